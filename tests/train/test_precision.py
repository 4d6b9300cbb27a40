import pytest
import torch
from torch import nn

from linattn.train.accelerator import create_accelerator, matrix_products
from linattn.train.compiling import safe_options
from linattn.train.config import TrainConfig
from linattn.train.evaluate import evaluate


def test_tf32_is_allowed_for_bf16_alone_and_taken_back():
    before = torch.get_float32_matmul_precision()
    with matrix_products("fp32"):
        assert torch.get_float32_matmul_precision() == before
    with matrix_products("bf16"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_a_smaller_last_batch_meets_the_model_in_the_shape_of_the_others_and_counts_as_it_is():
    shapes = []

    class Model(nn.Module):
        def forward(self, images):
            shapes.append(tuple(images.shape))
            return torch.stack([images.sum((1, 2, 3)), torch.zeros(len(images))], dim=1)

    images, labels = torch.randn(10, 1, 2, 2), torch.randint(0, 2, (10,))
    batches = [(images[s], labels[s]) for s in (slice(0, 4), slice(4, 8), slice(8, 10))]
    found = evaluate(Model(), batches, create_accelerator(TrainConfig()))
    assert shapes == [(4, 1, 2, 2)] * 3
    logits = torch.stack([images.sum((1, 2, 3)), torch.zeros(10)], dim=1)
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found.accuracy == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())


def test_the_reductions_that_lose_gradients_are_switched_off_where_inductor_has_them():
    from torch._inductor import config

    known = hasattr(config.triton, "mix_order_reduction")
    assert safe_options() == ({"triton.mix_order_reduction": False} if known else {})
