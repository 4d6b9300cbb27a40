import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from linattn.ops.exponential.call import ExponentialState
from linattn.ops.shared.types import LinearState
from linattn.testing import check_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, draw_x, per_query_head

GATES = ("exponential", "sigmoid")


def build(**options):
    torch.manual_seed(0)
    mechanism = create_mechanism("mlstm", num_heads=4, num_kv_heads=2, head_dim=6, input_dim=10, **options).double()
    with torch.no_grad():
        mechanism.input_map.weight.add_(0.5 * torch.randn(2, 10))
        mechanism.forget_map.weight.add_(0.5 * torch.randn(2, 10))
        mechanism.forget_map.bias.sub_(3)
    return mechanism


def gates_of(mechanism, x: Tensor, cap=None) -> tuple[Tensor, Tensor]:
    """i and f, (B, H_kv, T), from the parameters by hand."""
    both = [(x @ m.weight.T + m.bias).transpose(1, 2) for m in (mechanism.input_map, mechanism.forget_map)]
    if cap is not None:
        both = [cap * torch.tanh(z / cap) for z in both]
    return both[0].exp() if mechanism.input_gate == "exponential" else both[0].sigmoid(), both[1].sigmoid()


def recurrence(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators and q . n, token by token, without any stabiliser."""
    memory, n = torch.zeros(2, 2, 6, 6, dtype=torch.float64), torch.zeros(2, 2, 6, dtype=torch.float64)
    numerators, sums = [], []
    for t in range(q.shape[2]):
        memory = f[:, :, t, None, None] * memory + i[:, :, t, None, None] * k[:, :, t, :, None] * v[:, :, t, None, :]
        n = f[:, :, t, None] * n + i[:, :, t, None] * k[:, :, t]
        numerators.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], per_query_head(memory, 4)) / 6**0.5)
        sums.append((q[:, :, t] * per_query_head(n, 4)).sum(-1) / 6**0.5)
    return torch.stack(numerators, dim=2), torch.stack(sums, dim=2).unsqueeze(-1)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("impl", [*FORMS, "chunked"])
def test_recurrence(impl, gate):
    q, k, v = draw()
    x = draw_x()
    mechanism = build(causal=True, impl=impl, input_gate=gate)
    numerator, sums = recurrence(q, k, v, *gates_of(mechanism, x))
    assert (sums.abs() < 1).any()
    assert (sums.abs() > 1).any()
    torch.testing.assert_close(mechanism(q, k, v, x=x), numerator / sums.abs().clamp(min=1), **TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("impl", [*FORMS, "chunked"])
def test_both_directions_with_each_token_once(impl, gate):
    q, k, v = draw()
    x = draw_x()
    mechanism = build(impl=impl, input_gate=gate)
    i, f = gates_of(mechanism, x)
    one = recurrence(q, k, v, i, f)
    two = [t.flip(2) for t in recurrence(*(t.flip(2) for t in (q, k, v, i, f)))]
    own = per_query_head(i, 4).unsqueeze(-1) * (q * per_query_head(k, 4)).sum(-1, keepdim=True) / 6**0.5
    numerator, sums = one[0] + two[0] - own * per_query_head(v, 4), one[1] + two[1] - own
    torch.testing.assert_close(mechanism(q, k, v, x=x), numerator / sums.abs().clamp(min=1), **TOLERANCE)


def test_without_normaliser():
    q, k, v = draw()
    x = draw_x()
    mechanism = build(causal=True, input_gate="sigmoid", normalize=False)
    torch.testing.assert_close(mechanism(q, k, v, x=x), recurrence(q, k, v, *gates_of(mechanism, x))[0], **TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
def test_soft_cap(gate):
    q, k, v = draw()
    x = 4 * draw_x()
    mechanism = build(causal=True, input_gate=gate, soft_cap=3.0)
    numerator, sums = recurrence(q, k, v, *gates_of(mechanism, x, cap=3.0))
    torch.testing.assert_close(mechanism(q, k, v, x=x), numerator / sums.abs().clamp(min=1), **TOLERANCE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_of_any_size_stay_finite(dtype, causal):
    """e^1000 and e^-1000: neither may overflow, and where one token outweighs all, it alone is heard."""
    q, k, v = (t.to(dtype) for t in draw())
    mechanism = build(causal=causal).to(dtype)
    x = torch.zeros(2, 11, 10, dtype=dtype)
    x[:, 4, 0], x[:, 7, 0] = 1, -1
    with torch.no_grad():
        mechanism.input_map.weight.zero_()
        mechanism.input_map.weight[:, 0] = 1000
        mechanism.forget_map.weight.zero_()
        mechanism.forget_map.bias.fill_(1000)
    found = mechanism(q, k, v, x=x)
    assert found.isfinite().all()
    score = (q * per_query_head(k[:, :, 4:5], 4)).sum(-1, keepdim=True)
    alone = per_query_head(v[:, :, 4:5], 4) * score.sign()  # o = c v / |c| for a weight c beyond all others
    heard = slice(4, None) if causal else slice(None)
    torch.testing.assert_close(found[:, :, heard], alone[:, :, heard], rtol=1e-4, atol=1e-5)


def test_initial_values():
    torch.manual_seed(0)
    mechanism = create_mechanism("mlstm", num_heads=4, head_dim=8, causal=True)
    assert not mechanism.input_map.weight.any()
    assert not mechanism.forget_map.weight.any()
    assert mechanism.forget_map.bias.tolist() == [3, 4, 5, 6]
    assert 0 < mechanism.input_map.bias.abs().max() < 0.5  # five standard deviations
    fixed = create_mechanism("mlstm", num_heads=4, head_dim=8, input_bias=-10)
    assert fixed.input_map.bias.tolist() == [-10] * 4


@pytest.mark.parametrize(
    ("gate", "state_type", "size"), [("exponential", ExponentialState, 86), ("sigmoid", LinearState, 84)]
)
def test_state(gate, state_type, size):
    q, k, v = draw()
    mechanism = build(causal=True, input_gate=gate)
    _, state = mechanism.with_state(q, k, v, x=draw_x())
    assert type(state) is state_type
    assert mechanism.state_size(11) == size == sum(part.numel() for part in state) / 2
    other = build(causal=True, input_gate="sigmoid" if gate == "exponential" else "exponential")
    with pytest.raises(TypeError, match=f"state must be a .*, got {state_type.__name__}"):
        other.with_state(q, k, v, x=draw_x(), state=state)


@pytest.mark.parametrize("options", [
    {"input_gate": "sigmoid"}, {"input_gate": "sigmoid", "normalize": False}, {"soft_cap": 15.0, "input_bias": -1.0},
], ids=str)  # fmt: skip
def test_contracts_of_the_other_gate(options):
    contracts = ["forms", "causality", "padding", "hand_over", "gradients", "scaling"]
    assert check_mechanism("mlstm", contracts, **options)
