import pytest
import torch
from torch import nn

from linattn.lab.train.accelerator import create_accelerator, matrix_products
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import evaluate
from linattn.models.vision import create_vit
from linattn.support.compiling import compile_blocks


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the wrong code was seen on a GPU, at the size of training")
@pytest.mark.parametrize("impl", ["chunked", "auto"])
@pytest.mark.parametrize("name", ["focused", "pola", "mirror", "nala"])
def test_compiled_blocks_have_the_gradients_of_eager_ones(name, impl):
    torch._dynamo.reset()
    torch.manual_seed(0)
    attention = {"local": "channel", "impl": impl}
    size = {"img_size": 28, "in_chans": 1, "patch_size": 2, "depth": 1, "num_classes": 10}
    model = create_vit("tiny", name, attention=attention, **size).cuda()
    images, labels = torch.randn(250, 1, 28, 28, device="cuda"), torch.randint(0, 10, (250,), device="cuda")

    def gradients(precision):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            nn.functional.cross_entropy(model(images).float(), labels).backward()
        return {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}

    exact, eager = gradients("fp32"), gradients("bf16")
    compile_blocks(model)
    compiled = gradients("bf16")
    for key, want in exact.items():
        size = want.norm()
        # Two ways to round: neither is the truth, but both are about as far from it.
        assert (compiled[key] - want).norm() <= 3 * (eager[key] - want).norm() + 2**-8 * size, key
