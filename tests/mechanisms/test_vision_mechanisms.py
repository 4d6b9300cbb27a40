"""What holds for every mechanism of the vision papers; the contracts hold them to the rest."""

import pytest
import torch

from linattn import create_mechanism
from mechanisms.formulas import TOLERANCE, draw

VISION = ("angular", "focused", "hydra", "mirror", "nala")


def build(name: str, **options):
    torch.manual_seed(0)
    return create_mechanism(name, num_heads=4, head_dim=6, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", VISION)
def test_precisions(name, causal):
    q, k, v = draw(kv_heads=4)
    exact = build(name, causal=causal).double()(q, k, v)
    assert exact.dtype == torch.float64
    in_half = build(name, causal=causal).bfloat16()(*(x.bfloat16() for x in (q, k, v)))
    mechanism = build(name, causal=causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mechanism(*(x.float() for x in (q, k, v)))
        doubled = mechanism.double()(q, k, v)
    torch.testing.assert_close(doubled, exact, **TOLERANCE)
    for found in (in_half, mixed):
        assert found.dtype == torch.bfloat16
        # inputs, angles and features carry 8 bits (2^-9 relative each); powers and exponents multiply that
        assert (found.double() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("name", VISION)
def test_one_graph_serves_all_lengths(name):
    """Compiled once with lengths left open: masked and plain."""
    mechanism = build(name).double()
    torch.compiler.reset()
    # What a length left open breaks, it breaks in the first of the tracers; one mechanism goes through the second too.
    backend = "aot_eager" if name == "focused" else "eager"
    compiled = torch.compile(mechanism, fullgraph=True, dynamic=True, backend=backend)
    for length in (11, 17):
        q, k, v = draw(kv_heads=4, length=length)
        torch.testing.assert_close(compiled(q, k, v), mechanism(q, k, v), **TOLERANCE)
        mask = torch.arange(length).expand(2, -1) < 9
        torch.testing.assert_close(compiled(q, k, v, key_mask=mask), mechanism(q, k, v, key_mask=mask), **TOLERANCE)
    torch.compiler.reset()


@pytest.mark.parametrize("name", VISION)
def test_a_row_without_keys_is_finite(name):
    q, k, v = (x.requires_grad_() for x in draw(kv_heads=4))
    mask = torch.arange(11) < torch.tensor([[5], [0]])
    mechanism = build(name).double()
    out = mechanism(q, k, v, key_mask=mask)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, *mechanism.parameters()))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("name", ["angular", "hydra"])
def test_nothing_to_rotate(name):
    q, k, v = draw(kv_heads=4)
    with pytest.raises(ValueError, match=f"mechanism '{name}' has no features that rotate could turn"):
        build(name).double()(q, k, v, rotate=lambda q, k: (q, k))


@pytest.mark.parametrize("name", ["focused", "mirror", "nala"])
def test_rotated_features_are_for_the_numerator(name):
    """Turned by nothing they give what they were; turned around, the numerator changes its sign and no more."""
    q, k, v = draw(kv_heads=4)
    mechanism = build(name).double()
    plain = mechanism(q, k, v)
    torch.testing.assert_close(mechanism(q, k, v, rotate=lambda q, k: (q, k)), plain, **TOLERANCE)
    torch.testing.assert_close(mechanism(q, k, v, rotate=lambda q, k: (q, -k)), -plain, **TOLERANCE)
