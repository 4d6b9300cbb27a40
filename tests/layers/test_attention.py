"""The layer against its formula, over the registry, and in every way it is called."""

import pytest
import torch
import torch.nn.functional as F

from linattn import list_mechanisms, mechanism_info
from linattn.layers import Attention
from linattn.layers.rotary import plane_rotation, rotate_halves, rotations

DIM, HEADS, PLANE = 16, 2, (3, 4)
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # fp64 sums of a few dozen terms, in two orders
EVERY_PART = {"qk_norm": "rms", "key_position": PLANE, "local": "channel", "norm": "layer", "gate": "silu"}


def build(mechanism="elu", **options):
    torch.manual_seed(0)
    layer = Attention(DIM, HEADS, mechanism, **options).double()
    with torch.no_grad():  # what starts at 0 or 1 would hide what it does
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def draw(length=12, batch=2, seed=1):
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(x, linear, rows):
    out = F.linear(x, linear.weight[rows], linear.bias[rows])
    return out.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)


def softmax(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_grouped_heads():
    layer, x = build("softmax", num_kv_heads=1, local="shared"), draw()
    D = DIM // HEADS
    q, k, v = (heads(x, layer.qkv, s) for s in (slice(0, DIM), slice(DIM, DIM + D), slice(DIM + D, None)))
    local = layer.local(v, spatial_shape=PLANE)
    expected = layer.proj((softmax(q, k, v) + local).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, spatial_shape=PLANE), expected, **TOLERANCE)


def test_order_of_norm_local_branch_and_gate():
    """``W_o (LN(o + local(v)) * silu(g(x)))``, as NaLaFormer's code has it."""
    layer, x = build("softmax", local="channel", norm="layer", gate="silu"), draw()
    q, k, v = (heads(x, layer.qkv, slice(i * DIM, (i + 1) * DIM)) for i in range(3))
    plane = v.transpose(2, 3).reshape(2, DIM, *PLANE)
    conv = layer.local.conv
    lepe = F.conv2d(plane, conv.weight, conv.bias, padding=2, groups=DIM).flatten(2).transpose(1, 2)
    o = softmax(q, k, v).transpose(1, 2).flatten(2) + lepe
    normed = F.layer_norm(o, (DIM,), layer.norm.norm.weight, layer.norm.norm.bias, 1e-6)
    g = F.linear(x, layer.gate.proj.weight, layer.gate.proj.bias)
    expected = layer.proj(normed * g * torch.sigmoid(g))
    torch.testing.assert_close(layer(x, spatial_shape=PLANE), expected, **TOLERANCE)


def test_qk_norm_and_key_position():
    layer, x = build("softmax", qk_norm="layer", key_position=PLANE, num_prefix_tokens=1), draw(13)
    q, k, v = (heads(x, layer.qkv, slice(i * DIM, (i + 1) * DIM)) for i in range(3))
    q, k = layer.q_norm(q), layer.k_norm(k)
    embedding = layer.key_position.weight.reshape(1, HEADS, DIM // HEADS, 12).mT
    k = torch.cat([k[:, :, :1], k[:, :, 1:] + embedding], dim=2)
    expected = layer.proj(softmax(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, spatial_shape=PLANE), expected, **TOLERANCE)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", list_mechanisms(bidirectional=True))
def test_every_parameter_of_every_mechanism_learns(name, prefix):
    layer, x = build(name, num_prefix_tokens=prefix, **EVERY_PART), draw(12 + prefix).requires_grad_()
    out = layer(x, spatial_shape=PLANE)
    assert out.shape == x.shape
    torch.manual_seed(3)
    (out * torch.randn_like(out)).sum().backward()
    for parameter, p in {"x": x, **dict(layer.named_parameters())}.items():
        assert p.grad is not None, parameter
        assert p.grad.isfinite().all(), parameter
        assert p.grad.count_nonzero(), parameter


@pytest.mark.parametrize("name", list_mechanisms(bidirectional=True))
def test_padding_changes_nothing(name):
    """The last row of the plane is padding, of NaN: the other rows are what they are without it.

    With a class token: a mechanism that pools over the plane would have other bins on a larger one.
    """
    layer, x = build(name, num_prefix_tokens=1, **EVERY_PART | {"key_position": None}), draw(17)
    mask = torch.arange(17) < 13
    padded = x.masked_fill(~mask[:, None], torch.nan)
    out = layer(padded, key_mask=mask.expand(2, -1), spatial_shape=(4, 4))[:, :13]
    torch.testing.assert_close(out, layer(x[:, :13], spatial_shape=PLANE), **TOLERANCE)
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", list_mechanisms(causal=True))
def test_packed_sequences_stay_apart(name):
    layer, x = build(name, causal=True, qk_norm="rms", norm="head_rms", gate="linear"), draw(9, batch=1)
    packed = layer(x, cu_seqlens=torch.tensor([0, 4, 9]))
    apart = torch.cat([layer(x[:, :4]), layer(x[:, 4:])], dim=1)
    torch.testing.assert_close(packed, apart, **TOLERANCE)


@pytest.mark.parametrize("name", [n for n in list_mechanisms(causal=True) if mechanism_info(n).state != "none"])
def test_state_is_handed_over(name):
    layer, x = build(name, causal=True, num_kv_heads=None, norm="head_layer", gate="silu"), draw(9)
    whole = layer(x)
    first, state = layer.with_state(x[:, :5])
    second, state = layer.with_state(x[:, 5:7], state=state)
    steps = []
    for t in (7, 8):
        out, state = layer.step(x[:, t], state)
        steps.append(out)
    pieces = torch.cat([first, second, torch.stack(steps, dim=1)], dim=1)
    torch.testing.assert_close(pieces, whole, **TOLERANCE)


def positions(length, start=0, width=DIM // HEADS):
    return rotations(torch.arange(start, start + length)[None], [width], 100.0, draw())[width]


@pytest.mark.parametrize("canon", [None, "B", "b"])
@pytest.mark.parametrize("qk_norm", [None, "rms"])
def test_state_of_a_sequence_with_positions_and_canon(canon, qk_norm):
    """Formula of softmax with grouped heads, as a whole, in pieces and by steps."""
    options = {"causal": True, "num_kv_heads": 1, "rotary": 1.0, "canon": canon, "qk_norm": qk_norm}
    layer, x, D = build("softmax", **options), draw(9), DIM // HEADS
    q, k, v = layer.qkv(x).split([DIM, D, D], dim=-1)
    if qk_norm:
        q, k = layer.q_norm(q.unflatten(-1, (HEADS, D))).flatten(2), layer.k_norm(k)
    if canon:
        q, k, v = layer.canon(torch.cat([q, k, v], dim=-1)).split([DIM, D, D], dim=-1)
    q = rotate_halves(q.unflatten(-1, (HEADS, D)).transpose(1, 2), positions(9))
    k, v = rotate_halves(k[:, None], positions(9)), v[:, None]
    scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    whole = layer.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, rotation=positions(9)), whole, **TOLERANCE)
    first, state = layer.with_state(x[:, :6], rotation=positions(6))
    second, state = layer.with_state(x[:, 6:8], state=state, rotation=positions(2, 6))
    last, _ = layer.step(x[:, 8], state, rotation=positions(1, 8))
    torch.testing.assert_close(torch.cat([first, second, last[:, None]], dim=1), whole, **TOLERANCE)


@pytest.mark.parametrize("name", ["hedgehog", "softmax", "gated"])
def test_compiles_as_one_graph(name):
    rotary = None if name == "gated" else "features"
    layer, x = build(name, local="shared", rotary=rotary, gate="silu", norm="rms"), draw()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(x, spatial_shape=PLANE)
    torch.testing.assert_close(compiled(x, spatial_shape=PLANE), expected, **TOLERANCE)


WRONG = [
    ({"num_heads": 3}, ValueError, "num_heads must divide dim, got dim = 16 and num_heads = 3"),
    ({"mechanism": "nothing"}, ValueError, "mechanism must be one of"),
    ({"local": "wide"}, ValueError, "local must be one of None, 'shared', 'channel', got 'wide'"),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be an integer >= 1, got 0"),
    ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads = 2, got 3"),
    ({"qkv_bias": 1}, TypeError, "qkv_bias must be True or False, got 1"),
    ({"rotary": 1.5}, ValueError, "rotary must be a finite number >= 0 and <= 1, got 1.5"),
    ({"dim": 6, "rotary": 1.0}, ValueError, "a head_dim of 3 gives it 3: use an even head_dim"),
    ({"rotary": 1.0, "spatial_reduction": 2}, ValueError, "leaves fewer keys than tokens, but canon and rotary"),
    ({"canon": "A"}, ValueError, "canon must be one of None, 'B', 'b', got 'A'"),
    ({"mechanism": "rala", "causal": True}, ValueError, "mechanism 'rala' is only bidirectional"),
    ({"local_kernel": 4}, ValueError, "local_kernel must be odd"),
    ({"gate": "relu"}, ValueError, "gate must be one of None"),
    ({"norm": "batch"}, ValueError, "norm must be one of None"),
    ({"qk_norm": True}, ValueError, "qk_norm must be one of None, 'layer', 'rms', got True"),
    ({"rotary": "1d"}, ValueError, "rotary must be one of None, 'features', 'blocks'"),
    ({"spatial_reduction": 0}, ValueError, "spatial_reduction must be an integer >= 1, got 0"),
    ({"num_prefix_tokens": -1}, ValueError, "num_prefix_tokens must be an integer >= 0"),
    ({"key_position": 14}, ValueError, r"key_position must be a grid \(height, width\)"),
    ({"causal": True, "local": "shared"}, ValueError, "local='shared' looks at the whole image plane"),
    ({"causal": True, "spatial_reduction": 2}, ValueError, "spatial_reduction=2 looks at the whole image plane"),
    ({"mechanism": "gated", "spatial_reduction": 2}, ValueError, "takes a gate for every key"),
    ({"mechanism": "agent", "rotary": "features"}, ValueError, "mechanism 'agent' has none to turn"),
    ({"num_heads": 8, "rotary": "features"}, ValueError,
     r"turns 2 of the 2 features .* 2 must be a multiple of 4 and divide 2 \(head_dim = 2\)"),
    ({"mechanism": "softmax", "num_heads": 8, "rotary": "blocks"}, ValueError, "turns 2 of the 2 channels"),
    ({"mechanism": "performer", "rotary": "blocks"}, ValueError, "turns 8 of the 17 features of mechanism 'performer'"),
    ({"mechanism_options": {"causal": True}}, TypeError, "must not hold 'causal': the layer sets it"),
    ({"mechanism_options": {"wings": 2}}, TypeError, "mechanism 'elu' has no option 'wings'"),
    ({"num_prefix_tokens": 1, "mechanism": "lion", "mechanism_options": {"order": "snake"}}, ValueError,
     "order='snake' must hold num_prefix_tokens=1, the layer's number of tokens before the plane, got 0"),
    ({"mechanism": "lion", "mechanism_options": {"order": "snake", "num_prefix_tokens": 2}}, ValueError,
     "must hold num_prefix_tokens=0, .* got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=[str(next(iter(o))) for o, _, _ in WRONG])
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        Attention(**{"dim": DIM, "num_heads": HEADS} | options)


@pytest.mark.parametrize("decay", ["fixed", "selective"])
def test_a_mechanism_that_knows_of_prefix_tokens_sees_the_plane_behind_them(decay):
    own = {"decay": decay, "order": "snake", "num_prefix_tokens": 1}
    layer, x = build("lion", num_prefix_tokens=1, mechanism_options=own), draw(13)
    q, k, v = (heads(x, layer.qkv, slice(i * DIM, (i + 1) * DIM)) for i in range(3))
    gates = x if decay == "selective" else None
    out = layer.mechanism(q, k, v, x=gates, spatial_shape=PLANE)
    torch.testing.assert_close(layer(x, spatial_shape=PLANE), layer.proj(out.transpose(1, 2).flatten(2)), **TOLERANCE)
    turned = layer(x, spatial_shape=PLANE[::-1])
    assert (turned - layer(x, spatial_shape=PLANE)).abs().max() > 1e-3, "the plane matters"


@pytest.mark.parametrize("rotary", ["features", "blocks"])
@pytest.mark.parametrize("name", list_mechanisms(bidirectional=True))
def test_rotary_positions_are_refused_only_where_they_could_not_run(name, rotary):
    try:
        layer = build(name, rotary=rotary)
    except ValueError:
        mechanism, x = build(name).mechanism, draw()
        q, k, v = torch.randn(3, 2, HEADS, 12, DIM // HEADS, dtype=torch.float64)
        rotation = plane_rotation(PLANE, width=DIM // HEADS if rotary == "blocks" else None)
        with pytest.raises(ValueError, match=r"no features that rotate could turn|rotary positions turn"):
            mechanism(q, k, v, x=x if mechanism.info.uses_input else None, spatial_shape=PLANE, rotate=rotation)
    else:
        found = layer(draw(), spatial_shape=PLANE)
        assert found.isfinite().all()
        assert (found - build(name)(draw(), spatial_shape=PLANE)).abs().max() > 1e-4, "positions matter"


def test_bad_calls():
    layer = build(local="shared", num_prefix_tokens=1)
    with pytest.raises(ValueError, match=r"local='shared' needs spatial_shape=\(height, width\) of the tokens"):
        layer(draw())
    with pytest.raises(ValueError, match="3 x 4 and 1 prefix tokens make 13 tokens, got 12"):
        layer(draw(), spatial_shape=PLANE)
    with pytest.raises(ValueError, match="cu_seqlens packs sequences into one row"):
        layer(draw(13, 1), spatial_shape=PLANE, cu_seqlens=torch.tensor([0, 13]))
    with pytest.raises(ValueError, match="x has width 8, but the layer's dim has 16"):
        layer(draw()[..., :8])
    with pytest.raises(ValueError, match="a state needs causal=True"):
        build().with_state(draw())
    with pytest.raises(ValueError, match=r"rotation must be that of 8 channels \(rotary=1.0\)"):
        build(rotary=1.0)(draw())
    with pytest.raises(ValueError, match="rotation must be that of 0 channels"):
        build()(draw(), rotation=positions(12))
