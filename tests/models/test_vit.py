"""The vision transformer: any mechanism, any image, timm's names."""

import math

import pytest
import torch
from tests.models.vision.cases import silent, stir

from linattn import list_mechanisms
from linattn.layers import list_presets
from linattn.layers import preset as find_preset
from linattn.models.vision import VisionTransformer, create_deit_lion, create_vit
from linattn.models.vision.block import Block
from linattn.models.vision.patches import resize_positions, sincos_positions

SMALL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 5, "embed_dim": 16, "depth": 2, "num_heads": 2}


def build(mechanism="elu", **options):
    torch.manual_seed(0)
    return VisionTransformer(mechanism, **SMALL | options)


def image(height=8, width=8, batch=2):
    return torch.randn(batch, 1, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pos_embed", ["learned", "sincos", None])
@pytest.mark.parametrize("size", [(8, 8), (6, 10), (2, 2), (7, 9), (16, 12)])
def test_images_of_any_size(size, pos_embed):
    model = build("relu", pos_embed=pos_embed, cpe=2, mlp_conv=True, attention={"local": "shared"})
    features = model.forward_features(image(*size))
    assert features.shape == (2, 1 + math.ceil(size[0] / 2) * math.ceil(size[1] / 2), 16)
    assert model(image(*size)).isfinite().all()


def test_patches_that_are_not_square():
    model = build(patch_size=(2, 4), img_size=(8, 16))
    assert model.grid == (4, 4)
    assert model.forward_features(image(8, 16)).shape == (2, 17, 16)
    patch = model.patch_embed
    tokens, plane = patch(image(4, 8))
    assert plane == (2, 2)
    expected = (patch.proj.weight * image(4, 8)[0, :, :2, 4:]).sum((1, 2, 3)) + patch.proj.bias  # the upper right one
    torch.testing.assert_close(tokens[0, 1], expected)


def test_learned_positions_are_interpolated():
    grid = torch.arange(12.0).reshape(1, 12, 1) // 4  # the row of each patch
    positions = torch.cat([torch.full((1, 1, 1), 9.0), grid], dim=1)
    assert resize_positions(positions, (3, 4), (3, 4), 1) is positions
    larger = resize_positions(positions, (3, 4), (6, 2), 1)
    assert larger.shape == (1, 13, 1)
    assert larger[0, 0, 0] == 9
    rows = larger[0, 1:, 0].reshape(6, 2)
    torch.testing.assert_close(rows[:, 0], rows[:, 1])
    assert (rows[:, 0].diff() > -0.1).all()
    assert rows.mean() == pytest.approx(1, abs=1e-5)


def test_sincos_positions():
    positions = sincos_positions((2, 3), 8, torch.empty(0, dtype=torch.float64))
    row, column = 1, 2
    expected = [math.sin(column), math.sin(column / 100), math.cos(column), math.cos(column / 100)]
    expected += [math.sin(row), math.sin(row / 100), math.cos(row), math.cos(row / 100)]
    assert positions[0, 5].tolist() == pytest.approx(expected)


def test_parameters_are_those_of_timm():
    block = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    modules = ["patch_embed.proj", *(f"blocks.{i}.{part}" for i in range(2) for part in block), "norm", "head"]
    expected = {"cls_token", "pos_embed", *(f"{m}.{kind}" for m in modules for kind in ("weight", "bias"))}
    assert set(build("softmax").state_dict()) == expected
    scaled = set(build("softmax", init_values=1e-5).state_dict()) - expected
    assert scaled == {f"blocks.{i}.ls{j}.gamma" for i in range(2) for j in (1, 2)}
    assert {"fc_norm.weight", "fc_norm.bias"} <= set(build("softmax", global_pool="avg").state_dict())


@pytest.mark.parametrize("preset", [name for name in list_presets() if "rotary" in find_preset(name).attention])
@pytest.mark.parametrize("mechanism", list_mechanisms(bidirectional=True))
def test_any_mechanism_runs_in_any_block_with_rotary_positions(mechanism, preset):
    model = create_vit("digits", mechanism, preset=preset, depth=1)
    assert model(torch.randn(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize(("size", "millions"), [("tiny", 5.717416), ("small", 22.050664), ("base", 86.567656)])
def test_sizes_are_those_of_deit(size, millions):
    with torch.device("meta"):
        model = create_vit(size)
    assert sum(p.numel() for p in model.parameters()) == round(millions * 1e6)


def test_head():
    model = build()
    features = model.forward_features(image())
    before = model.forward_head(features, pre_logits=True)
    torch.testing.assert_close(before, features[:, 0])
    torch.testing.assert_close(model.forward_head(features), model.get_classifier()(before))
    with pytest.raises(ValueError, match="global_pool must be one of 'token', '', got 'avg'"):
        model.reset_classifier(3, "avg")
    for own, tokens in (({}, 16), ({"class_token": True}, 17)):  # of all tokens
        mean = build(global_pool="avg", **own)
        features = mean.forward_features(image())
        assert features.shape == (2, tokens, 16)
        torch.testing.assert_close(mean.forward_head(features, pre_logits=True), mean.fc_norm(features.mean(1)))


def test_start_and_weight_decay():
    model = build("hedgehog", attention={"key_position": (4, 4)})
    assert torch.equal(model.blocks[0].attn.mechanism.query_map.weight[0], torch.eye(8))
    assert model.blocks[0].attn.qkv.weight.std() < 0.03
    assert not model.head.bias.any()
    own = ("key_position", "mechanism.query_map", "mechanism.key_map")
    spared = {f"blocks.{i}.attn.{name}.weight" for i in range(2) for name in own}  # as this library's trainer does
    assert model.no_weight_decay() == {"pos_embed", "cls_token"} | spared


def test_block_formula():
    """Pre-norm, LayerScale on both branches, the residuals taken after the convolutional positions."""
    block = build("softmax", cpe=2, mlp_conv=True, init_values=0.3, global_pool="avg").blocks[0].double()
    x, plane = torch.randn(2, 12, 16, dtype=torch.float64), (3, 4)

    def position(part, x):
        return x + part.conv(x.mT.unflatten(2, plane)).flatten(2).mT

    x1 = position(block.cpe1, x)
    x1 = x1 + 0.3 * block.attn(block.norm1(x1), spatial_shape=plane)
    x2 = position(block.cpe2, x1)
    hidden = position(block.mlp.conv, torch.nn.functional.gelu(block.mlp.fc1(block.norm2(x2))))
    expected = x2 + 0.3 * block.mlp.fc2(hidden)
    # LayerScale starts in fp32, where 0.3 has 24 bits.
    torch.testing.assert_close(block(x, plane), expected, rtol=1e-6, atol=1e-7)


def test_compiles_as_one_graph():
    model = build("relu", cpe=1, mlp_conv=True, attention={"local": "channel", "rotary": "features", "gate": "silu"})
    model = model.double().eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = image(6, 10).double()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_pool": "max"}, "global_pool must be one of 'token', 'avg', '', got 'max'"),
        ({"pos_embed": "rope"}, "pos_embed must be one of 'learned', 'sincos', None, got 'rope'"),
        ({"pos_embed": "sincos", "embed_dim": 18}, "needs embed_dim to be a multiple of 4, got 18"),
        ({"class_token": False}, "global_pool='token' reads a class token, but class_token is False"),
        ({"patch_size": 0}, "patch_size must be an integer >= 1 or a pair"),
        ({"cpe": 3}, "cpe must be one of 0, 1, 2, got 3"),
        ({"mechanism": "none"}, "mechanism must be one of"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_bad_calls():
    with pytest.raises(ValueError, match="num_heads must be an integer >= 1, got '3'"):
        create_vit("digits", "elu", preset="nala", num_heads="3")
    with pytest.raises(ValueError, match="size must be one of 'base', 'small'"):
        create_vit("huge")
    with pytest.raises(ValueError, match=r"images must be \(B, 1, height, width\), got shape \(2, 3, 8, 8\)"):
        build()(torch.randn(2, 3, 8, 8))


# DeiT with LION's snakes around a class token.
LION = {"embed_dim": 16, "num_heads": 2, "depth": 2, "img_size": 32, "num_classes": 5, "drop_path_rate": 0.0}


def test_blocks_tell_a_mechanism_of_the_prefix_tokens_that_it_asks_for():
    lion = {"mechanism_options": {"order": "snake"}}
    assert Block(16, 2, "lion", num_prefix_tokens=1, attention=lion).attn.mechanism.num_prefix_tokens == 1
    assert Block(16, 2, "relu", num_prefix_tokens=1).attn.options.mechanism_options == {}


@pytest.mark.parametrize("decay", ["fixed", "selective"])
def test_deit_learns_at_any_size_of_image(decay):
    torch.manual_seed(0)
    model = create_deit_lion("tiny", decay=decay, **LION)
    stir(model)
    mechanism = model.blocks[0].attn.mechanism
    assert (mechanism.decay, mechanism.order, mechanism.num_prefix_tokens) == (decay, "snake", 1)
    assert model.pos_embed is None
    out = model(torch.randn(2, 3, 48, 30))
    out.square().sum().backward()
    assert not silent(model)


def test_layers_and_planes_in_timm():
    timm = pytest.importorskip("timm")
    from timm.models import group_parameters

    import linattn.models.vision.timm_models  # noqa: F401

    # DeiT's parameters less its positions, and two decays a head and block.
    for size in ("tiny", "small", "base"):
        with torch.device("meta"):
            model, deit = (timm.create_model(n) for n in (f"linattn_deit_{size}_lion", f"deit_{size}_patch16_224"))
        mine, theirs = (sum(p.numel() for p in m.parameters()) for m in (model, deit))
        assert mine == theirs - 197 * model.embed_dim + 12 * 2 * model.blocks[0].attn.num_heads
    model = timm.create_model("linattn_deit_tiny_lion", **LION).eval()
    assert len(group_parameters(model, model.group_matcher(), reverse=False)) == 4
    x = torch.randn(1, 3, 32, 48)
    last, planes = model.forward_intermediates(x)
    assert [p.shape for p in planes] == [(1, 16, 2, 3)] * 2
    torch.testing.assert_close(model.forward_head(last), model(x))
