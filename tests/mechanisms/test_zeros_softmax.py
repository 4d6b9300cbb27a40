import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from linattn.testing import check_mechanism
from mechanisms.formulas import TOLERANCE, draw, draw_x, per_query_head


def build(moved: float = 0.5, **options):
    torch.manual_seed(0)
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "input_dim": 10} | options
    mechanism = create_mechanism("zeros_softmax", **options).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(moved * torch.randn_like(parameter))
    return mechanism


def gates_of(mechanism, x: Tensor) -> list[Tensor]:
    """g1, gh and a g0, (B, H, T)."""
    values = (x @ mechanism.gate_map.weight.T + mechanism.gate_map.bias).transpose(1, 2)
    unit = mechanism.gate == "unit"
    g1, gh = ((1 + z.tanh() if unit else z.sigmoid()) for z in (values[:, :4], values[:, 4:8]))
    if values.shape[1] == 8:
        return [g1, gh, torch.zeros_like(g1)]
    return [g1, gh, float(mechanism.zero_order) * (values[:, 8:].tanh() + (1 if unit else 0))]


def weights(q: Tensor, k: Tensor, gates: list[Tensor], causal: bool) -> Tensor:
    """w (B, H, T, T), row by row from the definition."""
    z = torch.einsum("bhtd,bhsd->bhts", q, per_query_head(k, 4)) / 6**0.5
    w = torch.zeros_like(z)
    for t in range(z.shape[2]):
        count = t + 1 if causal else z.shape[3]
        seen = z[:, :, t, :count]
        delta = seen - seen.mean(-1, keepdim=True)
        g1, gh, g0 = (gate[:, :, t, None] for gate in gates)
        w[:, :, t, :count] = g1 * delta / count + gh * (seen.softmax(-1) - (1 + delta) / count) + g0 / count
    return w


@pytest.mark.parametrize("zero_order", [None, 1, 0.3, 0])
@pytest.mark.parametrize("gate", ["unit", "sigmoid"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_formula(impl, causal, gate, zero_order):
    q, k, v = draw()
    x = draw_x()
    mechanism = build(causal=causal, impl=impl, gate=gate, zero_order=zero_order)
    expected = weights(q, k, gates_of(mechanism, x), causal) @ per_query_head(v, 4)
    torch.testing.assert_close(mechanism(q, k, v, x=x), expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_unit_gates_are_softmax_bit_for_bit(impl, causal, dtype):
    q, k, v = (t.to(dtype) for t in draw())
    x = draw_x().to(dtype)
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "causal": causal, "impl": impl}
    mechanism = create_mechanism("zeros_softmax", input_dim=10, **options).to(dtype)
    softmax = create_mechanism("softmax", **options)
    real = torch.arange(11).expand(2, -1) < torch.tensor([[11], [7]])
    for call in ({}, {"key_mask": real}):
        assert torch.equal(mechanism(q, k, v, x=x, **call), softmax(q, k, v, **call))
    packed = {"cu_seqlens": torch.tensor([0, 4, 11])}
    row = q[:1], k[:1], v[:1]
    assert torch.equal(mechanism(*row, x=x[:1], **packed), softmax(*row, **packed))
    if causal:
        found, state = mechanism.with_state(q, k, v, x=x)
        expected, cache = softmax.with_state(q, k, v)
        assert torch.equal(found, expected)
        token = [t[:, :, 0] for t in (q, k, v)]
        assert torch.equal(mechanism.step(*token, state, x=x[:, 0]).output, softmax.step(*token, cache).output)


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_is_that_of_softmax(causal):
    """In dtype and, with unit gates, in every bit."""
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "causal": causal}
    mechanism = create_mechanism("zeros_softmax", input_dim=10, **options)
    softmax = create_mechanism("softmax", **options)
    q, k, v = (t.float() for t in draw())
    x = draw_x().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = mechanism(q, k, v, x=x), softmax(q, k, v)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        if causal:
            token = [t[:, :, 0] for t in (q, k, v)]
            assert mechanism.step(*token, None, x=x[:, 0]).output.dtype == torch.bfloat16


def test_unit_gates_start_at_one_and_learn():
    q, k, v = (t.float() for t in draw())
    mechanism = create_mechanism("zeros_softmax", num_heads=4, num_kv_heads=2, head_dim=6, causal=True)
    assert not mechanism.gate_map.weight.any()
    assert not mechanism.gate_map.bias.any()
    mechanism(q, k, v, x=torch.randn(2, 11, 24)).square().sum().backward()
    for parameter in mechanism.parameters():
        assert (parameter.grad.unflatten(0, (3, 4)) != 0).flatten(1).any(1).all()  # of each of the three gates


def test_contracts_of_sigmoid_gates():
    contracts = ["forms", "causality", "padding", "hand_over", "gradients", "scaling"]
    assert check_mechanism("zeros_softmax", contracts, gate="sigmoid")
