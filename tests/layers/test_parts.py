"""Each part against its formula."""

import math

import pytest
import torch
import torch.nn.functional as F

from linattn.layers import Attention, ConvolutionalPosition, DropPath, Mlp
from linattn.layers.attention_parts import KeyPosition, LocalBranch, OutputGate, SpatialReduction
from linattn.layers.norms import OutputNorm
from linattn.layers.rotary import plane_rotation

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
PLANE = (3, 5)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def convolve(plane, weight, bias):
    """Depthwise, zero padded, pixel by pixel: plane (C, h, w), weight (C, 1, n, n)."""
    _, h, w = plane.shape
    n = weight.shape[-1] // 2
    out = bias[:, None, None].repeat(1, h, w)
    for y in range(h):
        for x in range(w):
            for dy in range(-n, n + 1):
                for dx in range(-n, n + 1):
                    if 0 <= y + dy < h and 0 <= x + dx < w:
                        out[:, y, x] += weight[:, 0, dy + n, dx + n] * plane[:, y + dy, x + dx]
    return out


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("kernels", ["shared", "channel"])
def test_local_branch(kernels, prefix):
    branch, v = LocalBranch(2, 3, kernels, 5).double(), draw(1, 2, prefix + 15, 3)
    out = branch(v, spatial_shape=PLANE, num_prefix_tokens=prefix)
    assert branch.conv.weight.shape[0] == (3 if kernels == "shared" else 6)
    for head in range(2):
        own = slice(0, 3) if kernels == "shared" else slice(3 * head, 3 * head + 3)
        plane = v[0, head, prefix:].T.reshape(3, *PLANE)
        expected = convolve(plane, branch.conv.weight[own].detach(), branch.conv.bias[own].detach())
        torch.testing.assert_close(out[0, head, prefix:], expected.flatten(1).T, **TOLERANCE)
    assert not out[:, :, :prefix].any()


@pytest.mark.parametrize("prefix", [0, 1])
def test_convolutional_position(prefix):
    part, x = ConvolutionalPosition(3, num_prefix_tokens=prefix).double(), draw(1, prefix + 15, 3)
    out = part(x, spatial_shape=PLANE)
    plane = x[0, prefix:].T.reshape(3, *PLANE)
    expected = (plane + convolve(plane, part.conv.weight.detach(), part.conv.bias.detach())).flatten(1).T
    torch.testing.assert_close(out[0, prefix:], expected, **TOLERANCE)
    assert torch.equal(out[:, :prefix], x[:, :prefix])


def test_convolutional_position_does_not_see_padding():
    part, x = ConvolutionalPosition(3).double(), draw(1, 15, 3)
    mask = torch.arange(15)[None] < 10
    padded = part(x.masked_fill(~mask[..., None], torch.nan), spatial_shape=PLANE, key_mask=mask)
    torch.testing.assert_close(padded[:, :10], part(x[:, :10], spatial_shape=(2, 5)), **TOLERANCE)


@pytest.mark.parametrize("activation", ["linear", "silu"])
def test_gate(activation):
    gate, x, o = OutputGate(4, 6, activation).double(), draw(2, 3, 4), draw(2, 3, 6, seed=1)
    g = x @ gate.proj.weight.T + gate.proj.bias
    expected = o * (g if activation == "linear" else g / (1 + (-g).exp()))
    torch.testing.assert_close(gate(o, x), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["layer", "rms", "head_layer", "head_rms"])
def test_output_norm(kind):
    norm, o = OutputNorm(2, 4, kind).double(), draw(3, 5, 8)
    y = o.reshape(3, 5, 2, 4) if kind.startswith("head") else o
    if kind.endswith("layer"):
        y = y - y.mean(-1, keepdim=True)
    expected = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()).reshape(o.shape)
    torch.testing.assert_close(norm(o), expected, **TOLERANCE)
    assert sum(p.numel() for p in norm.parameters()) == (4 if "head" in kind else 8) * (2 if "layer" in kind else 1)


def test_key_position_and_its_resizing():
    part, k = KeyPosition(2, 3, (2, 2)).double(), draw(1, 2, 5, 3)
    torch.nn.init.normal_(part.weight)
    out = part(k, spatial_shape=(2, 2), num_prefix_tokens=1)
    embedding = part.weight.reshape(2, 3, 4).mT
    torch.testing.assert_close(out[0, :, 1:], k[0, :, 1:] + embedding, **TOLERANCE)
    assert torch.equal(out[:, :, :1], k[:, :, :1])
    constant = KeyPosition(2, 3, (2, 2)).double()
    torch.nn.init.ones_(constant.weight)
    torch.testing.assert_close(constant(draw(1, 2, 35, 3), spatial_shape=(5, 7)), draw(1, 2, 35, 3) + 1, **TOLERANCE)


def test_rotation_formula():
    """Pair i of the first half turns by row 10000^(-i / (W/4 - 1)), of the second half by column."""
    phi = draw(1, 1, 16, 12)
    turned, same = plane_rotation(PLANE, width=12, num_prefix_tokens=1)(phi, phi)
    assert torch.equal(turned, same)
    assert torch.equal(turned[:, :, 0], phi[:, :, 0])
    for token in range(15):
        row, column = divmod(token, 5)
        for pair in range(6):
            position = row if pair < 3 else column
            angle = position * 10000 ** (-(pair % 3) / 2)
            a, b = phi[0, 0, token + 1, 2 * pair : 2 * pair + 2].tolist()
            expected = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
            assert turned[0, 0, token + 1, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected, abs=1e-12)


def test_rotation_in_blocks_and_of_reduced_keys():
    phi, psi = draw(1, 1, 16, 8), draw(1, 1, 4, 8)
    rotate = plane_rotation((4, 4), width=4, key_shape=(2, 2), stride=2)
    turned, keys = rotate(phi, psi)
    for half in (slice(0, 4), slice(4, 8)):
        alone, _ = plane_rotation((4, 4), width=4)(phi[..., half], phi[..., half])
        torch.testing.assert_close(turned[..., half], alone, **TOLERANCE)
    angle = 2.5  # the middle of rows 2 and 3
    a, b = psi[0, 0, 2, :2].tolist()
    expected = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    assert keys[0, 0, 2, :2].tolist() == pytest.approx(expected)


def test_rotary_acts_on_the_numerator_only():
    torch.manual_seed(0)
    layer, x = Attention(8, 1, "elu", rotary="features").double(), draw(2, 15, 8)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 8)).unbind(2)
    phi, psi = F.elu(q) + 1, F.elu(k) + 1
    turned = plane_rotation(PLANE, width=8)(phi[:, None], psi[:, None])
    numerator = turned[0][:, 0] @ turned[1][:, 0].mT @ v
    expected = layer.proj(numerator / ((phi @ psi.mT).sum(-1, keepdim=True) + 1e-6))
    torch.testing.assert_close(layer(x, spatial_shape=PLANE), expected, **TOLERANCE)


def test_rotary_of_softmax_turns_queries_and_keys():
    torch.manual_seed(0)
    layer, x = Attention(8, 1, "softmax", rotary="features").double(), draw(2, 15, 8)
    q, k, v = (t[:, None] for t in layer.qkv(x).unflatten(-1, (3, 8)).unbind(2))
    q, k = plane_rotation(PLANE, width=8)(q, k)
    expected = layer.proj(((q @ k.mT / 8**0.5).softmax(-1) @ v)[:, 0])
    torch.testing.assert_close(layer(x, spatial_shape=PLANE), expected, **TOLERANCE)


def test_spatial_reduction():
    part, x = SpatialReduction(3, 2, num_prefix_tokens=1).double(), draw(2, 16, 3)
    tokens, mask = part(x, spatial_shape=PLANE)
    assert part.reduced_shape(PLANE) == (2, 3)
    assert mask is None
    plane = torch.zeros(2, 3, 4, 6, dtype=torch.float64)
    plane[:, :, :3, :5] = x[:, 1:].mT.reshape(2, 3, *PLANE)
    windows = plane.reshape(2, 3, 2, 2, 3, 2)  # rows, in a window, columns, in a window
    reduced = torch.einsum("bcyixj,ocij->byxo", windows, part.conv.weight) + part.conv.bias
    expected = F.layer_norm(torch.cat([x[:, :1], reduced.flatten(1, 2)], dim=1), (3,), eps=1e-6)
    torch.testing.assert_close(tokens, expected, **TOLERANCE)


def test_reduced_padding_is_padding():
    part, x = SpatialReduction(3, 2).double(), draw(1, 12, 3)
    mask = torch.ones(1, 3, 4, dtype=torch.bool)
    mask[:, :, 3] = False
    mask[:, 2] = False
    x = x.masked_fill(~mask.flatten(1)[..., None], torch.nan)
    tokens, reduced = part(x, spatial_shape=(3, 4), key_mask=mask.flatten(1))
    assert reduced.tolist() == [[True, True, False, False]]
    assert tokens.isfinite().all()


@pytest.mark.parametrize("local", [None, "shared"])
def test_attention_to_reduced_keys(local):
    torch.manual_seed(0)
    layer = Attention(8, 2, "softmax", spatial_reduction=2, num_prefix_tokens=1, local=local, rotary="blocks").double()
    x = draw(2, 16, 8).requires_grad_()
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 11:] = False
    out = layer(x, spatial_shape=PLANE, key_mask=mask)
    out[mask].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    assert not x.grad[~mask].any()
    assert {"q.weight", "kv.weight", "reduction.conv.weight"} <= dict(layer.named_parameters()).keys()


def test_mlp_with_convolution():
    part, x = Mlp(3, 6, conv=True).double(), draw(1, 15, 3)
    y = F.gelu(part.fc1(x))
    plane = y[0].T.reshape(6, *PLANE)
    conv = part.conv.conv
    y = y + convolve(plane, conv.weight.detach(), conv.bias.detach()).flatten(1).T
    torch.testing.assert_close(part(x, spatial_shape=PLANE), part.fc2(y), **TOLERANCE)


@pytest.mark.parametrize("in_tensor", [False, True])
def test_drop_path_drops_samples_and_keeps_the_mean(in_tensor):
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.ones(4000, 2, 3)
    if in_tensor:
        drop.rate_to_tensor(x.device)
    assert drop.state_dict() == {}
    out = drop(x)
    kept = out[:, 0, 0] != 0
    assert torch.equal(out, kept[:, None, None] * torch.full_like(x, 1 / 0.75))
    assert kept.float().mean() == pytest.approx(0.75, abs=0.03)  # four standard deviations of 4000 draws
    assert drop.eval()(x) is x
    with pytest.raises(ValueError, match="rate must be a number"):
        DropPath(1)
    drop.train().rate = 0
    assert torch.equal(drop(x), x)
