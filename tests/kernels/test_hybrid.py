"""``hybrid_attention(impl="triton")``: windows, chosen tokens, states, padding and gradients, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.budget import assert_within
from kernels.device import DEVICE
from linattn.kernels.hybrid import config as hybrid_config
from linattn.kernels.hybrid.token_list import listed
from linattn.ops.hybrid.api import hybrid_attention, hybrid_attention_with_state
from linattn.ops.hybrid.call import HybridCall
from linattn.ops.hybrid.rows import build_rows
from linattn.ops.hybrid.types import SalientBudget
from linattn.testing.poison import poisoned_allocations
from ops.hybrid_cases import call, change, make

SIZE = {"B": 2, "H": 2, "H_kv": 1, "K": 12, "V": 20, "F": 40}
# Options, inputs, where the sequence is cut and its state handed over; each can fail for a reason of its own.
CASES = {
    "a chunk of two tiles, gate, own scores": (
        {"window": 64, "layout": "chunks", "delay": 0, "budget": SalientBudget(1 / 16, 64)}, {"gate": True}, None,
    ),
    "chosen tokens give way, and come from a state": (
        {"window": 32, "layout": "chunks", "budget": SalientBudget(1 / 8, 32, cap=5, sinks=2)}, {"scores": True}, 70,
    ),
    "sliding, they give way inside of windows": (
        {"window": 40, "budget": SalientBudget(1 / 8, 32, cap=3, sinks=0)}, {"scores": True}, 45,
    ),
    "sliding, gate": ({"window": 21}, {"gate": True}, None),
    "weights in units of one": (
        {"window": 32, "layout": "chunks", "delay": 0, "units": "one", "budget": SalientBudget(1 / 8, 32)}, {}, None,
    ),
    "no window": ({"window": 0}, {"gate": True}, 50),
}  # fmt: skip


def run(inputs, impl, cut=None, mask=None, **options):
    """Outputs and the gradients of all inputs, through the state where there is a cut."""
    leaves = change(inputs, _as_projected)
    T, state, outputs = inputs["q"].shape[2], None, []
    for a, b in ((0, T),) if cut is None else ((0, cut), (cut, T)):
        piece = change(leaves, lambda x, a=a, b=b: x[:, :, a:b])
        own = None if mask is None else mask[:, a:b]
        out = call(piece, True, impl=impl, key_mask=own, initial_state=state, **options)
        state = out.state
        outputs.append(out.output)
    output = torch.cat(outputs, 2)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss = (output.double() * weights.double()).sum() + state.linear.kv.double().sin().sum()
    names = [name for name in leaves if name not in ("features", "scores")]
    wanted = [leaves[name] for name in names] + list(leaves["features"] or ())
    grads = torch.autograd.grad(loss, wanted, materialize_grads=True, allow_unused=True)
    found = {"output": output, "kv": state.linear.kv}
    found |= {f"d {name}": x for name, x in zip([*names, "phi", "psi"], grads, strict=False)}
    return {name: x.detach() for name, x in found.items()}


def _as_projected(x):
    """Tokens before heads in memory."""
    x = x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return x.requires_grad_() if x.is_floating_point() else x


def check(inputs, dtype=torch.float32, **options):
    inputs = change(inputs, lambda x: x.to(DEVICE))
    wide = change(inputs, lambda x: x.double() if x.is_floating_point() else x)
    exact = run(wide, "reference", **options)
    with poisoned_allocations():
        found = run(inputs, "triton", **options)
    assert_within(found, exact, run(inputs, "chunked", **options), inputs=dtype)
    return found


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    options, more, cut = CASES[name]
    mask = torch.arange(100, device=DEVICE) >= torch.tensor([[0], [19]], device=DEVICE)
    inputs = make(100, dtype=torch.float32, **SIZE, **more)
    if "scores" in inputs:  # tokens do give way, to later ones
        inputs["scores"] += torch.arange(100) / 16
    check(change(inputs, lambda x: _hidden(x, mask)), cut=cut, mask=mask, **options)


def _hidden(x, mask):
    """NaN at padding."""
    hidden = ~mask[:, None, :].to(x.device)
    return x.masked_fill(hidden if x.ndim == 3 else hidden.unsqueeze(-1), torch.nan if x.is_floating_point() else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, monkeypatch):
    """Widths that are no multiple of 16; blocks of chosen tokens shorter than their list."""
    if DEVICE == "cpu":
        monkeypatch.setitem(hybrid_config.TRIAL, "L", 32)
        monkeypatch.setitem(hybrid_config.TRIAL, "BN", 16)
    inputs = make(96, dtype=dtype, **{**SIZE, "B": 1}, scores=True)
    inputs["scores"] = inputs["scores"].float()
    check(inputs, dtype, window=32, layout="chunks", delay=0, budget=SalientBudget(1 / 2, 32))


def test_without_features_it_is_softmax_over_what_is_exact():
    inputs = change(make(64, dtype=torch.float32, **SIZE), lambda x: x.to(DEVICE))
    q, k, v = (inputs[n].double() for n in "qkv")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    every = SalientBudget(1.0, 32)  # all that leave the window
    for window in ({"window": 32, "budget": every}, {"window": 32, "layout": "chunks", "delay": 0, "budget": every}):
        for features in (inputs["features"], None):
            found = call(inputs | {"features": features}, impl="triton", **window)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_the_past_keeps_every_bit_when_the_future_changes():
    options = {"window": 32, "layout": "chunks", "delay": 0, "impl": "triton"}
    inputs = change(make(128, dtype=torch.float32, **SIZE), lambda x: x.to(DEVICE))
    after = torch.arange(128, device=DEVICE)[:, None] >= 70
    changed = change(inputs, lambda x: torch.where(after, 100 * x.flip(2).abs(), x))
    assert torch.equal(call(inputs, **options)[:, :, :70], call(changed, **options)[:, :, :70])


def test_who_is_served():
    q = torch.randn(1, 2, 8, 16, device=DEVICE)
    for options, words in (
        ({"window": 48, "layout": "chunks"}, "chunks of a multiple of 32 tokens, got 48"),
        ({"features": (q.new_ones(1, 2, 8, 257),) * 2}, "up to 256 features a head, got 257"),
    ):
        with pytest.raises(ValueError, match=words):
            hybrid_attention(q, q, q, impl="triton", **options)
    with pytest.raises(ValueError, match="float64"):
        hybrid_attention(q.double(), q.double(), q.double(), impl="triton")


@pytest.mark.parametrize("sinks", [0, 2])
def test_chunks_look_at_all_slots_that_count_for_them(sinks):
    """Of a state and of the rows; where no token stays for good, those that all have ended are left out."""
    torch.manual_seed(0)
    budget = SalientBudget(1 / 8, 32, cap=6, sinks=sinks)
    q, k, v = torch.randn(3, 2, 2, 700, 8).unbind()
    scores = torch.rand(2, 2, 700) + torch.arange(700) / 200  # later ones are better
    options = {"window": 32, "layout": "chunks", "budget": budget}
    parts = ((x[:, :, :90], x[:, :, 90:]) for x in (q, k, v, q.exp(), k.exp(), scores))
    (q0, q), (k0, k), (v0, v), (phi0, phi), (psi0, psi), (s0, scores) = parts
    state = hybrid_attention_with_state(q0, k0, v0, features=(phi0, psi0), scores=s0, **options).state
    for given in (None, state):
        call = HybridCall(q, k, v, features=(phi, psi), scores=scores, initial_state=given, need_state=True, **options)
        rows, _ = build_rows(call, torch.float32)
        found, own = listed(rows, 1, 8), rows.salient
        slot, chunk = torch.arange(found.begin.shape[2]), torch.arange(rows.k.shape[2] // 32)[:, None]
        counts = (found.begin.unsqueeze(2) <= chunk) & (chunk < found.end.unsqueeze(2))
        low, high = found.spans.unbind(-1)
        looked = (low.unsqueeze(-1) <= slot) & (slot < high.unsqueeze(-1))
        assert counts.any(-1)[:, :, -1].all()
        assert not (counts & ~looked).any()
        assert not (low % 8).any()
        assert high.max() <= len(slot)
        assert bool((low[:, :, -1] > 0).all()) == (sinks == 0)
        ends = (own.until_of_rows(rows.k.shape[2]) - rows.start[:, None, None]).clamp(min=0)
        assert torch.equal(found.ends.long(), (ends // 32).clamp(max=1 << 30))
