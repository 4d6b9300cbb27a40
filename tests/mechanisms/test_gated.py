import pytest
import torch

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, draw_x, per_query_head

GATES = ("channel", "head")


def build(**options):
    torch.manual_seed(0)
    return create_mechanism("gated", num_heads=4, num_kv_heads=2, head_dim=6, input_dim=10, **options).double()


def gates_of(mechanism, x: torch.Tensor) -> torch.Tensor:
    """alpha (B, H_kv, T, D), from the parameters by hand."""
    if mechanism.gate == "head":
        (linear,) = mechanism.gate_map
        logits = (x @ linear.weight.T + linear.bias).unsqueeze(-1).expand(-1, -1, -1, 6)
    else:
        low, high = mechanism.gate_map
        assert low.weight.shape == (16, 10)
        assert low.bias is None
        logits = (x @ low.weight.T @ high.weight.T + high.bias).reshape(*x.shape[:2], 2, 6)
    return torch.sigmoid(logits).pow(1 / 16).transpose(1, 2)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("impl", FORMS)
def test_recurrence(impl, gate):
    q, k, v = draw()
    x = draw_x()
    mechanism = build(causal=True, impl=impl, gate=gate)
    alpha, state, outputs = gates_of(mechanism, x), torch.zeros(2, 2, 6, 6, dtype=torch.float64), []
    for t in range(11):
        state = alpha[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], per_query_head(state, 4)) / 6**0.5)
    torch.testing.assert_close(mechanism(q, k, v, x=x), torch.stack(outputs, dim=2), **TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
def test_bidirectional_is_both_directions_with_each_token_once(gate):
    q, k, v = draw()
    x = draw_x()
    one_way, both_ways = build(causal=True, gate=gate), build(gate=gate)
    forward = one_way(q, k, v, x=x)
    backward = one_way(q.flip(2), k.flip(2), v.flip(2), x=x.flip(1)).flip(2)
    own = (q * per_query_head(k, 4)).sum(-1, keepdim=True) / 6**0.5 * per_query_head(v, 4)
    torch.testing.assert_close(both_ways(q, k, v, x=x), forward + backward - own, **TOLERANCE)


def test_needs_x():
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"takes its gates from x \(2, 11, 10\), but x is None"):
        build()(q, k, v)
    with pytest.raises(ValueError, match=r"x must have shape \(2, 11, 10\)"):
        build()(q, k, v, x=draw_x(3))
