"""Vision transformers of timm: norms, gates, masks, and blocks that have no attention of their own."""

import pytest
import torch
from torch.testing import assert_close

timm = pytest.importorskip("timm")

from tests.convert.adapters import families  # noqa: E402

from linattn.convert.adapters import find_adapter  # noqa: E402
from linattn.convert.plan import LayerShape  # noqa: E402

IMAGES = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def build(**changes):
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7}
    model = VisionTransformer(**(options | changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # timm starts so small that attention hardly matters
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def call(model):
    return model(IMAGES)


@pytest.fixture(scope="module")
def model():
    return build()


def test_sites(model):
    families.check_parts(model, ["blocks.0.attn", "blocks.1.attn"], LayerShape(4, 4, 8, 32, causal=False))


def test_blocks_of_another_kind_are_named_not_convertible():
    from timm.models.vision_transformer import ParallelScalingBlock

    for changes, kind in (({"block_fn": ParallelScalingBlock}, "ParallelScalingBlock"),
                          ({"attn_layer": "diff"}, "DiffAttention")):  # fmt: skip
        other = build(**changes)
        site = find_adapter(other).sites(other)[0]
        assert not site.convertible
        assert kind in site.why_not


@pytest.mark.parametrize("kind", ["plain", "norms", "gated"])
def test_teacher_mode_is_the_model(kind):
    from timm.layers import Attention

    class Gated(Attention):
        def __init__(self, *args, **options):
            super().__init__(*args, gated=True, **options)

    changes = {"plain": {}, "norms": {"qk_norm": True, "scale_attn_norm": True}, "gated": {"attn_layer": Gated}}[kind]
    families.check_teacher(build(**changes), call)


def test_features_change_the_attention_and_no_weight(model):
    families.check_features(model, call)


def test_zeros_softmax_starts_without_loss(model):
    families.check_lossless_start(model, call)


def test_masks_are_padding_or_refused(model):
    """A hidden token is as one that is not there."""
    student = families.converted(model, "features", mechanism="elu")
    attention = student.blocks[0].attn
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False
    expected = attention(x[1:, :4])[0]
    assert_close(attention(x, attn_mask=mask)[1, :4], expected, **families.TOLERANCE)
    added = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf).expand(2, 1, 6, 6)
    assert_close(attention(x, attn_mask=added)[1, :4], expected, **families.TOLERANCE)
    with pytest.raises(ValueError, match="padding only"):
        attention(x, attn_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="is_causal=True"):
        attention(x, is_causal=True)
