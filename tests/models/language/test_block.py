"""The block against its formula, with nothing but torch."""

import pytest
import torch
import torch.nn.functional as F

from linattn.layers.rotary import SequenceRotary, rotate_halves, rotations
from linattn.models.language.block import Block, Tokens
from linattn.models.language.options import BlockOptions

DIM, HEADS, GROUPS, HIDDEN, LENGTH = 16, 2, 1, 24, 9
D = DIM // HEADS
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
SIZES = {"dim": DIM, "num_heads": HEADS, "num_kv_heads": GROUPS, "mlp_dim": HIDDEN}


def build(**options):
    torch.manual_seed(0)
    block = Block(BlockOptions(**(SIZES | options))).double()
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return block


def draw(length=LENGTH, batch=2):
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens_for(x, width=D, **options):
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    return Tokens(rotations=rotations(positions, [width], 10000.0, x), **options)


def rope(x, width):
    """Rotary positions written as complex numbers: channel i and i + width / 2 are one of them."""
    half = width // 2
    z = torch.complex(x[..., :half], x[..., half:width])
    frequencies = 10000.0 ** (-2 * torch.arange(half, dtype=x.dtype) / width)
    z = z * torch.polar(torch.ones_like(frequencies), torch.arange(x.shape[2], dtype=x.dtype)[:, None] * frequencies)
    return torch.cat([z.real, z.imag, x[..., width:]], dim=-1)


def canon(module, h):
    return h if module is None else module(h)


@pytest.mark.parametrize("letters", ["", "A", "B", "b", "C", "D", "ABCD", "AbCD"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_formula(letters, mlp):
    """Softmax attention, grouped heads, RMS norms of q and k, rotary positions on half of a head."""
    block, x = build(mechanism="softmax", canon=letters, mlp=mlp, qk_norm="rms", rotary=0.5, norm="layer"), draw()
    attn, found = block.attn, block(x, tokens_for(x, D // 2))
    h = canon(block.canon_a, block.norm1(x))
    q, k, v = (h @ attn.qkv.weight.mT).split([DIM, D, D], dim=-1)
    q = attn.q_norm(q.unflatten(-1, (HEADS, D))).flatten(2)
    q, k, v = canon(attn.canon, torch.cat([q, attn.k_norm(k), v], dim=-1)).split([DIM, D, D], dim=-1)
    q = rope(q.unflatten(-1, (HEADS, D)).transpose(1, 2), D // 2)
    k, v = rope(k.unsqueeze(1), D // 2), v.unsqueeze(1)
    scores = (q @ k.mT / D**0.5).masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
    y = x + attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    hidden = canon(block.mlp.canon, block.mlp.fc1(canon(block.canon_c, block.norm2(y))))
    hidden = F.silu(hidden[..., :HIDDEN]) * hidden[..., HIDDEN:] if mlp == "swiglu" else F.gelu(hidden)
    torch.testing.assert_close(found, y + block.mlp.fc2(hidden), **TOLERANCE)
    modules = (block.canon_a, attn.canon, block.canon_c, block.mlp.canon)
    assert sum(module is not None for module in modules) == len(letters)


@pytest.mark.parametrize("width", [D, D // 2])
def test_turned_heads_are_rounded_once_and_lie_as_they_did(width):
    """With and without a gradient, which is turned back."""
    x = torch.randn(2, 9, HEADS, D).bfloat16().transpose(1, 2).requires_grad_()
    rotation = rotations(torch.arange(9).unsqueeze(0), [width], 10000.0, x)[width]
    found = rotate_halves(x, rotation)
    a, b = x.detach()[..., :width].double().chunk(2, dim=-1)
    cos, sin = rotation.cos[..., : width // 2].double(), rotation.sin[..., width // 2 :].double()
    exact = torch.cat([a * cos - b * sin, b * cos + a * sin, x.detach()[..., width:].double()], dim=-1)
    assert ((found - exact).abs() <= torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 1e-6).all()
    with torch.no_grad():
        assert torch.equal(rotate_halves(x, rotation), found)
    d_out = torch.randn_like(found)
    (gradient,) = torch.autograd.grad(found, x, d_out)
    assert torch.equal(gradient, rotate_halves(d_out, SequenceRotary(rotation.cos, -rotation.sin)))
