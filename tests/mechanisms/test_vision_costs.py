"""The mechanisms of vision papers: what they say they cost is what can be counted, and every precision works."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linattn import create_mechanism
from mechanisms.formulas import draw

CAUSAL = (
    ("pola", {}), ("pola_plus", {}), ("inline", {}), ("mala", {}), ("quadratic", {}), ("quadratic", {"form": "exact"}),
    ("quadratic", {"form": "normalized"}), ("quadratic", {"linear_term": True}),
)  # fmt: skip
ALL = (*CAUSAL, ("efficient", {}), ("rala", {}), ("agent", {"num_agents": 9}))
HEADS, KV_HEADS, LENGTH = 4, 2, 11


def build(name: str, **options):
    torch.manual_seed(0)
    return create_mechanism(name, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=6, **options)


@pytest.mark.parametrize(("name", "options"), CAUSAL)
def test_state_size(name, options):
    q, k, v = (x.float() for x in draw(length=LENGTH))
    mechanism = build(name, causal=True, **options)
    _, state = mechanism.with_state(q, k, v)
    assert mechanism.state_size(LENGTH) * 2 == sum(part.numel() for part in state)  # a batch of two


@pytest.mark.parametrize(("name", "options"), ALL)
def test_flops(name, options):
    """Counted: the sum over keys and the read of every query, each with its denominator; and what is pooled."""
    mechanism = build(name, **options)
    flows, width = (2, 3) if name.startswith("pola") else (1, 6)  # two flows, each over half of the values
    heads, kv_heads = flows * HEADS, flows * (HEADS if name == "agent" else KV_HEADS)
    phi, psi = (torch.randn(h, LENGTH, mechanism.num_features) for h in (heads, kv_heads))
    with FlopCounterMode(display=False) as counted:
        state = psi.mT @ torch.randn(kv_heads, LENGTH, width + 1)
        phi @ state.repeat_interleave(heads // kv_heads, dim=0)
        if name == "agent":
            agents = phi.mT @ torch.randn(heads, LENGTH, 6)
            for x in (phi, psi):
                x.new_empty(heads, LENGTH, 6) @ agents.mT
    assert mechanism.flops(LENGTH) == counted.get_total_flops()


@pytest.mark.parametrize(("name", "options"), ALL)
def test_bad_length(name, options):
    mechanism = build(name, **options)
    for count in (mechanism.state_size, mechanism.flops):
        with pytest.raises(ValueError, match="length must be an integer >= 0, got -1"):
            count(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), ALL)
def test_precisions(name, options, dtype):
    inputs = draw(length=LENGTH)
    mechanism = build(name, **options).double()
    exact = mechanism(*inputs)
    assert exact.dtype == torch.float64
    rounded = [x.to(dtype) for x in inputs]
    plain = mechanism.to(dtype)(*rounded)
    mechanism.float()
    with torch.autocast("cpu", dtype=dtype):
        mixed, both = mechanism(*(x.float() for x in inputs)), mechanism(*rounded)
    for found in (plain, mixed, both):
        assert found.dtype == dtype
        # inputs carry 8 bits (2^-9 relative each) or 11; third powers and exponents of a few units multiply that
        assert (found.double() - exact).abs().max() < (0.05 if dtype == torch.bfloat16 else 0.01) * exact.abs().max()


@pytest.mark.parametrize(("name", "options"), ALL)
def test_lengths_may_change_under_compile(name, options):
    """The eps of a mean depends on the number of keys: one compiled graph must serve them all."""
    mechanism = build(name, **options).double()
    torch.compiler.reset()
    compiled = torch.compile(mechanism, fullgraph=True, dynamic=True, backend="eager")
    for length in (11, 17):
        q, k, v = draw(length=length)
        mask = torch.rand(2, length) < 0.7
        torch.testing.assert_close(compiled(q, k, v, key_mask=mask), mechanism(q, k, v, key_mask=mask))
    torch.compiler.reset()
