import importlib.metadata

import pytest
import torch
from torch import Tensor

import linattn
from linattn.mechanisms import registry
from linattn.mechanisms.base import Call, LinearMechanism, Mechanism, MechanismOutput

BUILT_IN = {
    "agent", "angular", "cosformer", "efficient", "elu", "focused", "gated", "hedgehog", "hydra", "inline", "lion",
    "mala", "mirror", "mlstm", "nala", "performer", "pola", "pola_plus", "quadratic", "rala", "relu", "retention",
    "softmax", "taylor", "window", "zeros", "zeros_softmax",
}  # fmt: skip


class Plain(LinearMechanism):
    """A mechanism of another package."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Tensor]:
        return {"q": q, "k": k, "v": v}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone afterwards."""
    registry.list_mechanisms()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def test_built_in_mechanisms_are_found():
    assert set(linattn.list_mechanisms()) >= BUILT_IN
    assert linattn.list_mechanisms() == sorted(linattn.list_mechanisms())


def test_registered_class_is_built_by_name():
    decorate = linattn.register_mechanism("plain", paper="none", year=2026)
    assert decorate(Plain) is Plain
    assert isinstance(linattn.create_mechanism("plain", num_heads=2, head_dim=4), Plain)
    assert linattn.mechanism_info("plain").summary == "A mechanism of another package"
    decorate(Plain)  # the same class again is no clash: a reloaded module


def test_duplicate_name():
    class Elu(Plain):
        pass

    with pytest.raises(ValueError, match=r"mechanism 'elu' is registered already, by linattn\.mechanisms\.elu"):
        linattn.register_mechanism("elu", paper="none", year=2026)(Elu)


def test_bad_declarations():
    with pytest.raises(ValueError, match="name must be letters"):
        linattn.register_mechanism("two words", paper="none", year=2026)
    with pytest.raises(ValueError, match="causal, bidirectional or both"):
        linattn.register_mechanism("plain", paper="none", year=2026, causal=False, bidirectional=False)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"mechanism must be one of .*elu.*, got 'elo'"):
        linattn.create_mechanism("elo", num_heads=2, head_dim=4)


def test_options_of_a_mechanism():
    options = registry.mechanism_options(linattn.mechanism_info("retention").cls)
    assert set(options) == {"num_heads", "head_dim", "normalizer", "num_kv_heads", "causal", "impl", "input_dim"}
    assert options["impl"] == "auto"
    assert options["normalizer"] is None
    assert "gate" not in registry.mechanism_options(linattn.mechanism_info("elu").cls)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"head_dim": 2.0}, ValueError, "head_dim must be an integer >= 1"),
        ({"causal": "yes"}, TypeError, "causal must be True or False"),
        ({"input_dim": -1}, ValueError, "input_dim must be an integer >= 1"),
    ],
)
def test_bad_common_options(wrong, error, message):
    for name in sorted(BUILT_IN):
        with pytest.raises(error, match=message):
            linattn.create_mechanism(name, **{"num_heads": 4, "head_dim": 8} | wrong)


def test_filters():
    assert set(linattn.list_mechanisms(cost="quadratic")) & BUILT_IN == {"softmax", "zeros_softmax"}
    assert set(linattn.list_mechanisms(state="growing")) & BUILT_IN == {"softmax", "zeros_softmax"}
    gated = {"gated", "lion", "mlstm", "zeros", "zeros_softmax"}
    assert set(linattn.list_mechanisms(uses_input=True)) & BUILT_IN == gated
    assert set(linattn.list_mechanisms(causal=False)) & BUILT_IN == {"agent", "efficient", "rala"}
    assert BUILT_IN - set(linattn.list_mechanisms(bidirectional=True)) == {"window"}
    linattn.register_mechanism("plain", paper="none", year=2026, causal=False)(Plain)
    assert "plain" in linattn.list_mechanisms(causal=False)
    assert "plain" not in linattn.list_mechanisms(causal=True)
    with pytest.raises(ValueError, match="mechanism 'plain' is only bidirectional: use causal=False"):
        linattn.create_mechanism("plain", num_heads=2, head_dim=4, causal=True)


def test_no_state():
    class Stateless(Mechanism):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
            return MechanismOutput(v, None)

        def state_size(self, length: int) -> int:
            return 0

        def flops(self, length: int) -> int:
            return 0

    linattn.register_mechanism("stateless", paper="none", year=2026, state="none")(Stateless)
    mechanism = linattn.create_mechanism("stateless", num_heads=2, head_dim=4, causal=True)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="'stateless' has no recurrent form"):
        mechanism.with_state(q, q, q)
    with pytest.raises(ValueError, match="'stateless' has no recurrent form"):
        mechanism.step(q[:, :, 0], q[:, :, 0], q[:, :, 0], None)


class Entry:
    """An entry point of a package that is installed beside this one."""

    name, value = "third_party", "other_package.attention"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def load(self) -> type[Mechanism]:
        if self.error is not None:
            raise self.error
        return linattn.register_mechanism("third_party", paper="none", year=2026)(Plain)


def discover_with(monkeypatch, entry: Entry) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "linattn.mechanisms" else [])
    registry._discover.cache_clear()


def test_entry_points(monkeypatch):
    assert registry.entry_points is importlib.metadata.entry_points
    discover_with(monkeypatch, Entry())
    assert "third_party" in linattn.list_mechanisms()


def test_a_broken_entry_point_is_named_and_left_out(monkeypatch):
    discover_with(monkeypatch, Entry(ImportError("no module named cuda_thing")))
    with pytest.warns(UserWarning, match=r"'third_party' of other_package\.attention .* no module named cuda_thing"):
        assert set(linattn.list_mechanisms()) >= BUILT_IN


def test_rows_of_the_table_are_the_registry():
    rows = registry.mechanism_rows()
    assert [row[0] for row in rows] == linattn.list_mechanisms()
    assert all(len(row) == len(registry.COLUMNS) and all(row) for row in rows)
    by_name = {row[0]: row for row in rows}
    assert by_name["softmax"][2:] == ("arXiv:1706.03762 (2017)", "yes", "yes", "growing", "quadratic")
    assert by_name["gated"][1].endswith("(needs x)")
    lines = registry.markdown_table().splitlines()
    assert all(line.replace("\\|", "").count("|") == len(registry.COLUMNS) + 1 for line in lines)
    assert any("`elu(x) + 1`" in line and "](https://arxiv.org/abs/2006.16236) (2020)" in line for line in lines)
