"""LION's snakes around a class token: in the layer, in DeiT, in timm."""

import pytest
import torch
from tests.models.vision.cases import silent, stir

from linattn.models.vision import VisionTransformer, create_deit_lion
from linattn.models.vision.block import Block

SMALL = {"embed_dim": 16, "num_heads": 2, "depth": 2, "img_size": 32, "num_classes": 5, "drop_path_rate": 0.0}


def test_blocks_tell_a_mechanism_of_the_prefix_tokens_that_it_asks_for():
    lion = {"mechanism_options": {"order": "snake"}}
    attn = Block(16, 2, "lion", num_prefix_tokens=1, attention=lion).attn
    assert attn.mechanism.num_prefix_tokens == 1
    assert Block(16, 2, "relu", num_prefix_tokens=1).attn.options.mechanism_options == {}
    with pytest.raises(ValueError, match="3 x 5 and 1 prefix tokens make 16 tokens, got 13"):
        attn(torch.randn(1, 13, 16), spatial_shape=(3, 5))
    with pytest.raises(ValueError, match="cu_seqlens"):
        attn(torch.randn(2, 13, 16), cu_seqlens=torch.tensor([0, 13]), spatial_shape=(3, 4))


@pytest.mark.parametrize("decay", ["fixed", "selective"])
def test_deit_learns_at_any_size_of_image(decay):
    torch.manual_seed(0)
    model = create_deit_lion("tiny", decay=decay, **SMALL)
    stir(model)
    mechanism = model.blocks[0].attn.mechanism
    assert (mechanism.decay, mechanism.order, mechanism.num_prefix_tokens) == (decay, "snake", 1)
    assert model.pos_embed is None
    out = model(torch.randn(2, 3, 48, 30))
    out.square().sum().backward()
    assert not silent(model)


def test_the_mean_of_all_tokens_is_read():
    torch.manual_seed(0)
    model = VisionTransformer("relu", global_pool="avg", class_token=True, **SMALL).eval()
    tokens = model.forward_features(torch.randn(2, 3, 32, 32))
    assert tokens.shape[1] == 5
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), tokens.mean(1))
    with pytest.raises(ValueError, match="global_pool='token' reads a class token, but class_token is False"):
        VisionTransformer("relu", class_token=False, **SMALL)


def test_names_in_timm():
    timm = pytest.importorskip("timm")
    from timm.models import group_parameters

    import linattn.models.vision.timm_models  # noqa: F401

    # 5, 22 and 86 million as published: DeiT's less its positions, and two decays a head and block.
    for size, count in (("tiny", 5_679_664), ("small", 21_975_160), ("base", 86_416_648)):
        with torch.device("meta"):
            model = timm.create_model(f"linattn_deit_{size}_lion")
        assert sum(p.numel() for p in model.parameters()) == count
        with torch.device("meta"):
            theirs = sum(p.numel() for p in timm.create_model(f"deit_{size}_patch16_224").parameters())
        assert count == theirs - 197 * model.embed_dim + 12 * 2 * model.blocks[0].attn.num_heads
    planes = timm.create_model("linattn_deit_tiny_lion", features_only=True, out_indices=2, **SMALL)
    assert planes.feature_info.reduction() == [16, 16]
    assert [p.shape for p in planes(torch.randn(1, 3, 32, 48))] == [(1, 16, 2, 3)] * 2
    model = timm.create_model("linattn_deit_tiny_lion", **SMALL).eval()
    groups = group_parameters(model, model.group_matcher(), reverse=False)
    assert len(groups) == 4
    x = torch.randn(1, 3, 32, 32)
    last, _ = model.forward_intermediates(x)
    torch.testing.assert_close(model.forward_head(last), model(x))
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*found)
