"""What the backbones are made of, against plain formulas and against timm's own models."""

import pytest
import torch
import torch.nn.functional as F
from tests.models.vision.cases import images, stir
from torch import nn

from linattn.models.vision import Pyramid, create_efficientvit, create_swin
from linattn.models.vision.efficientvit_parts import MultiScaleAttention
from linattn.models.vision.patches import PatchMerge, PatchStep
from linattn.models.vision.swin import WindowAttention


@pytest.mark.parametrize(
    ("plane", "window", "shift"),
    [((6, 9), 3, 0), ((6, 9), 3, 1), ((7, 5), 3, 1), ((8, 7), 4, 2), ((2, 7), 3, 1), ((2, 2), 3, 1), ((1, 1), 4, 3)],
)
def test_window_attention_by_its_definition(plane, window, shift):
    """A token sees those whose row and column fall into the same window; all pairs, one mask."""
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, window, shift).double()
    stir(layer, 0.5)
    x = torch.randn(2, plane[0] * plane[1], 8, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(plane[0]).repeat_interleave(plane[1])
    columns = torch.arange(plane[1]).repeat(plane[0])
    same = torch.ones(len(rows), len(rows), dtype=torch.bool)
    for place, length in ((rows, plane[0]), (columns, plane[1])):
        own = (place - (shift if length > window else 0)).div(window, rounding_mode="floor")
        same &= own[:, None] == own
    table = layer.relative_position_bias.unflatten(0, (2 * window - 1, 2 * window - 1))
    between = [(p[:, None] - p).clamp(1 - window, window - 1) + window - 1 for p in (rows, columns)]
    bias = table[between[0], between[1]].permute(2, 0, 1)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / 2 + bias).masked_fill(~same, -torch.inf)
    expected = layer.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    out = layer(x, spatial_shape=plane)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(out)
    leaves = [x, layer.relative_position_bias]
    mine = torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True)
    for gradient, wanted in zip(mine, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)


def test_windows_refuse_masks():
    layer = WindowAttention(8, 2, 3)
    with pytest.raises(ValueError, match="key_mask, cu_seqlens and rotation must be None"):
        layer(torch.randn(1, 4, 8), key_mask=torch.ones(1, 4, dtype=torch.bool), spatial_shape=(2, 2))
    with pytest.raises(ValueError, match="a window needs spatial_shape"):
        layer(torch.randn(1, 4, 8))


def test_multi_scale_attention_by_its_formula():
    """Scale by scale and head by head, the mechanism called on one head at a time."""
    torch.manual_seed(0)
    layer = MultiScaleAttention(8, 4, "relu", scales=(3, 5), grid=(2, 3)).double()
    stir(layer, 0.3)
    layer.eval()
    x = torch.randn(2, 8, 2, 3, dtype=torch.float64)
    first = torch.einsum("bchw,oc->bohw", x, layer.qkv.weight[:, :, 0, 0])
    scales = [first]
    for wide, mix in layer.scales:
        smooth = F.conv2d(first, wide.weight, padding=wide.weight.shape[-1] // 2, groups=24)
        groups = [mix.weight[4 * g : 4 * g + 4, :, 0, 0] for g in range(6)]
        scales.append(torch.cat([torch.einsum("bchw,oc->bohw", smooth[:, 4 * g : 4 * g + 4], w)
                                 for g, w in enumerate(groups)], dim=1))  # fmt: skip
    outs, position = [], layer.key_position.weight
    for h in range(6):
        own = scales[h // 2][:, h % 2 * 12 : h % 2 * 12 + 12]
        q, k, v = own[:, :4], own[:, 4:8] + position[:, 4 * h : 4 * h + 4], own[:, 8:]
        phi, psi, values = q.relu().flatten(2), k.relu().flatten(2), v.flatten(2)
        weights = torch.einsum("bct,bcs->bts", phi, psi)
        out = torch.einsum("bts,bcs->bct", weights / (weights.sum(-1, keepdim=True) + 1e-6), values)
        outs.append(out.unflatten(2, (2, 3)) + F.gelu(layer.value_norm(v)))
    expected = layer.norm(layer.proj(torch.cat(outs, dim=1)))
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)  # relu's eps may differ


def test_merged_patches_of_an_odd_plane():
    merge, x = PatchMerge(2, 3), torch.randn(1, 2, 3, 4)
    filled = F.pad(x, (0, 0, 0, 1))
    four = torch.cat([filled[0, :, 2 + i, j] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))])  # the lower left token
    expected = merge.reduction.weight @ F.layer_norm(four, (8,), eps=1e-6)
    torch.testing.assert_close(merge(x)[0, :, 1, 0], expected)


def test_patches_and_their_positions():
    step = PatchStep(3, 8, 4, grid=(4, 4))
    x = images(16, 16)
    plane = step.embed.proj(x).permute(0, 2, 3, 1)
    expected = F.layer_norm(plane, (8,), eps=1e-6) + step.pos_embed.unflatten(1, (4, 4))
    torch.testing.assert_close(step(x), expected.permute(0, 3, 1, 2))
    with torch.no_grad():
        step.pos_embed.fill_(3.0)
    moved = step(images(9, 30))
    step.pos_embed = None
    torch.testing.assert_close(moved, step(images(9, 30)) + 3)  # a constant stays one however it is resized


def copy_in_order(target, source):
    """Both list their parameters and buffers in one order, under names of their own."""
    values = [v for k, v in source.state_dict().items() if "relative_position_index" not in k and "attn_mask" not in k]
    own = target.state_dict()
    assert [v.shape for v in own.values()] == [v.shape for v in values]
    target.load_state_dict(dict(zip(own, values, strict=True)))


def same_eps(target, source):
    """Theirs and ours differ in eps; what is compared here is everything else."""
    kinds = (nn.LayerNorm, nn.BatchNorm2d)
    mine, theirs = ([m for m in model.modules() if isinstance(m, kinds)] for model in (target, source))
    for own, other in zip(mine, theirs, strict=True):
        own.eps = other.eps


def test_softmax_swin_is_timms():
    timm = pytest.importorskip("timm.models.swin_transformer")
    shape = {"depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 4), "embed_dim": 16, "num_classes": 7}
    # 24, 12, 6 and 3 tokens down and across: shifted windows in all stages but the last.
    theirs = timm.SwinTransformer(img_size=(96, 96), window_size=3, **shape).eval()
    stir(theirs)
    mine = create_swin("t", "softmax", window=3, **shape).eval()
    copy_in_order(mine, theirs)
    same_eps(mine, theirs)
    x = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "kind"), [("1", "EfficientVit"), ("4", "EfficientVitLarge")])
def test_relu_efficientvit_is_timms(size, kind):
    timm = pytest.importorskip("timm.models.efficientvit_mit")
    shape = {"widths": (8, 8, 16, 16, 32), "depths": (1, 2, 2, 2, 2), "head_dim": 8, "head_widths": (24, 20)}
    theirs = getattr(timm, kind)(num_classes=7, **shape)
    stir(theirs)
    theirs(torch.randn(4, 3, 64, 64))  # moves the running statistics
    mine = create_efficientvit(size, "relu", key_position=False, value_branch=False, num_classes=7, **shape)
    copy_in_order(mine, theirs)
    same_eps(mine, theirs)
    for module in theirs.modules():
        if isinstance(module, timm.LiteMLA):
            module.eps = 1e-15  # that of EfficientViT's own code, which the host has; timm's default is 1e-5
    x = torch.randn(2, 3, 40, 72)
    torch.testing.assert_close(mine.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stride", "sides"), [(4, [8, 4, 2, 1]), (2, [16, 8, 4, 2]), (1, [32, 16, 8, 4])])
def test_another_stem_leaves_more_tokens_and_the_same_parameters(stride, sides):
    shape = {"embed_dims": (8, 8, 16, 16), "depths": (1, 2, 1, 1), "num_heads": (1, 1, 2, 2), "head_width": 16}
    model = Pyramid("relu", preset="flatten", stem_stride=stride, img_size=32, num_classes=3, **shape).eval()
    planes = model.forward_intermediates(torch.randn(1, 3, 32, 32), intermediates_only=True)
    assert [plane.shape[2] for plane in planes] == sides
    assert [info["reduction"] for info in model.feature_info] == [32 // side for side in sides]
    with pytest.raises(ValueError, match="stem_stride"):
        Pyramid("relu", stem_stride=3, **shape)
    published = Pyramid("relu", preset="flatten", img_size=32 * 4 // stride, num_classes=3, **shape)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in published.named_parameters()}
