"""The map of any mechanism: what it gives to v is what the mechanism gives."""

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism, list_mechanisms
from linattn.analysis import attention_map as module
from linattn.analysis.attention_map import attention_map, attention_row
from linattn.mechanisms.base import Call, LinearMechanism, MechanismOutput
from linattn.testing.cases import Subject, subject_of

EXACT = {"rtol": 0, "atol": 1e-10}
# Weights that depend on the channel of v: two flows, and as many heads as channels.
BY_CHANNEL = {"pola", "pola_plus", "hydra"}
# The angular mechanism's unit length and the norm of zeros are not linear in v; agents fewer than tokens.
OPTIONS = {"angular": {"output_norm": "sum"}, "zeros": {"head_norm": False}, "agent": {"num_agents": 4}}
LENGTH = 13  # more than the 8 channels of a head: one probe does not see them all


def draw(heads: int = 2, tokens: int = LENGTH, width: int = 8) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(3, 2, heads, tokens, width, generator=generator, dtype=torch.float64).unbind()


def literal_map(mechanism, q: Tensor, k: Tensor) -> Tensor:
    """The definition: values that are 1 at one token in all channels, and the mean of the output over channels."""
    columns = []
    for s in range(k.shape[2]):
        v = torch.zeros_like(k)
        v[:, :, s] = 1
        columns.append(mechanism(q, k, v).mean(-1))
    return torch.stack(columns, dim=-1)


SUBJECTS = [subject_of(name, **OPTIONS.get(name, {})) for name in list_mechanisms()]
CASES = [(one, causal, grouped) for one in SUBJECTS for causal in one.modes for grouped in one.groupings(causal)]


@pytest.mark.parametrize(("subject", "causal", "grouped"), CASES, ids=lambda x: x if type(x) is bool else x.info.name)
def test_map_times_values_is_the_output_and_rows_are_its_rows(subject: Subject, causal: bool, grouped: bool):
    mechanism = subject.build(causal, grouped=grouped)
    inputs = subject.inputs(mechanism, length=LENGTH)
    v = inputs.v.repeat_interleave(mechanism.num_heads // mechanism.num_kv_heads, dim=1)
    output = mechanism(inputs.q, inputs.k, inputs.v, x=inputs.x)
    channels = attention_map(mechanism, inputs.q, inputs.k, x=inputs.x, channels=True)
    torch.testing.assert_close(torch.einsum("bhtsd,bhsd->bhtd", channels, v), output, **EXACT)
    weights = attention_map(mechanism, inputs.q, inputs.k, x=inputs.x)
    torch.testing.assert_close(weights, channels.mean(-1), **EXACT)
    uniform = bool(((weights @ v - output).abs() < 1e-10).all())
    assert uniform == (subject.info.name not in BY_CHANNEL)
    if causal:
        assert not weights.triu(1).any()
    for token in (7, -1):
        row = attention_row(mechanism, inputs.q, inputs.k, token, x=inputs.x)
        torch.testing.assert_close(row, weights[:, :, token], **EXACT)
        assert not row.requires_grad


@pytest.mark.parametrize("name", ["pola", "hydra", "softmax"])
@pytest.mark.parametrize("budget", [1, 10**9])
def test_any_grouping_of_probes_gives_the_literal_map(name, budget, monkeypatch):
    monkeypatch.setattr(module, "PROBE_NUMBERS", budget)
    q, k, _ = draw()
    mechanism = create_mechanism(name, num_heads=2, head_dim=8).double()
    weights = attention_map(mechanism, q, k)
    torch.testing.assert_close(weights, literal_map(mechanism, q, k), **EXACT)
    single = attention_map(mechanism.float(), q.float(), k.float())
    torch.testing.assert_close(single, weights.float(), rtol=1e-4, atol=1e-5)


def test_angular_with_its_unit_length_has_the_map_of_the_sum():
    q, k, v = draw()
    mechanism = create_mechanism("angular", num_heads=2, head_dim=8).double()
    weights = attention_map(mechanism, q, k)
    directions = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    scores = 0.5 + directions[0] @ directions[1].mT / torch.pi
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.nn.functional.normalize(weights @ v, dim=-1), mechanism(q, k, v), **EXACT)
    assert mechanism.output_norm == "l2"


@pytest.mark.parametrize("name", ["relu", "softmax", "nala", "inline", "quadratic", "pola"])
def test_rotation_turns_the_map(name):
    q, k, v = draw()

    def rotate(phi: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs of channels, as complex numbers, by the place of their token."""
        turns = (torch.arange(x.shape[2]).double()[:, None] for x in (phi, psi))
        pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (phi, psi))
        return tuple(torch.view_as_real(x * (1j * t).exp()).flatten(-2) for x, t in zip(pairs, turns, strict=True))

    mechanism = create_mechanism(name, num_heads=2, head_dim=8).double()
    channels = attention_map(mechanism, q, k, rotate=rotate, channels=True)
    output = mechanism(q, k, v, rotate=rotate)
    torch.testing.assert_close(torch.einsum("bhtsd,bhsd->bhtd", channels, v), output, **EXACT)
    row = attention_row(mechanism, q, k, 4, rotate=rotate)
    torch.testing.assert_close(row, channels.mean(-1)[:, :, 4], **EXACT)
    assert (channels.mean(-1) - attention_map(mechanism, q, k)).abs().amax() > 1e-3


def test_plane_and_other_lengths_of_keys():
    q, k, v = draw(tokens=15)
    agent = create_mechanism("agent", num_heads=2, head_dim=8, num_agents=4).double()
    weights = attention_map(agent, q, k, spatial_shape=(3, 5))
    torch.testing.assert_close(weights @ v, agent(q, k, v, spatial_shape=(3, 5)), **EXACT)
    assert (weights - attention_map(agent, q, k)).abs().amax() > 1e-4
    relu = create_mechanism("relu", num_heads=2, head_dim=8).double()
    weights = attention_map(relu, q, k[:, :, :4])
    assert weights.shape == (2, 2, 15, 4)
    torch.testing.assert_close(weights @ v[:, :, :4], relu(q, k[:, :, :4], v[:, :, :4]), **EXACT)


class Own(LinearMechanism):
    """Linear attention over exponentials, whose weights or outputs a subclass changes."""

    def arguments(self, q, k, v, *, x):
        return {"q": q.exp(), "k": k.exp(), "v": v}

    @property
    def num_features(self) -> int:
        return self.head_dim


class Squared(Own):
    """Not linear in v."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        return MechanismOutput(super().attend(q, k, v, call).output.square(), None)


class Mixing(Own):
    """Linear in v, but a channel of the output is made of its neighbour too."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        out = super().attend(q, k, v, call).output
        return MechanismOutput(out + out.roll(1, -1), None)


class Uneven(Own):
    """Three channels have twice the weights of the other five."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        return super().attend(q, k, v * (1 + (torch.arange(8) < 3)), call)


def test_kinds_of_channels_need_not_be_equally_many():
    q, k, _ = draw()
    weights = literal_map(Own(2, 8), q, k)
    torch.testing.assert_close(attention_map(Uneven(2, 8), q, k), weights * 11 / 8, **EXACT)
    torch.testing.assert_close(attention_map(Uneven(2, 8), q, k, channels=True)[..., 2], 2 * weights, **EXACT)


@pytest.mark.parametrize("cls", [Squared, Mixing])
def test_what_has_no_map_is_refused(cls):
    q, k, _ = draw()
    with pytest.raises(ValueError, match=f"{cls.__name__} is not linear in v"):
        attention_map(cls(2, 8), q, k)
    with pytest.raises(ValueError, match="token must be an integer from -13 to 12, got 13"):
        attention_row(cls(2, 8), q, k, 13)
