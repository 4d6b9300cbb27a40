"""`linattn models` and `throughput`: loss and gradients that are checked, backbones beside their twins, forms heard."""

from dataclasses import replace

import pytest
import torch

from linattn.lab.bench.check import by_kind, distances
from linattn.lab.bench.hosts import CASES, PIXELS, SMALLEST, TINY, Host, ModelCase, backbone_case, select
from linattn.lab.bench.models import Models, StepTruth, Throughput, forms, make_step
from linattn.mechanisms.base import Mechanism
from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.options import OptionError

CPU = torch.device("cpu")
SMALL = Models(device="cpu", only=("vit-224",), mechanisms=("pola",), modes=("compiled", "cuda-graph"), quick=True)
TRAINING = Throughput(device="cpu", mechanisms=("elu",), quick=True, lengths=(8, 16), tokens=32)


def statuses(rows):
    return {(row["mechanism"], row["status"]) for row in rows}


def test_every_row_is_checked_timed_and_weighed(rows_of, tmp_path):
    config = replace(SMALL, only=("vit-224", "language-8192-b1"), mechanisms=("relu", "gated-head"))
    rows = rows_of(replace(config, modes=("compiled", "called", "reduce-overhead", "cuda-graph")), tmp_path)
    absent = [row for row in rows if row["mode"] == "cuda-graph"]
    assert {(row["status"], row["reason"]) for row in absent} == {("absent", "CUDA graphs need a GPU")}
    rows = [row for row in rows if row["mode"] != "cuda-graph"]
    names = ["softmax", "relu", "gated-head"]
    assert [(row["case"], row["mechanism"]) for row in rows if row["mode"] == "called"] == [
        (case, name) for case in ("vit-224", "language-8192-b1") for name in names
    ]
    for row in rows:
        assert row["status"] == "ok", row
        assert 0 < row["error"] <= row["budget"] < 1e-3
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        units = 2 * 24 if row["unit"] == "tokens" else 2
        assert row["per_second"] == pytest.approx(1000 * units / row["median_ms"])
        assert row["peak_bytes"] > 4 * row["parameters"]  # gradients of all of them at the least
        same = [r for r in rows if (r["case"], r["mode"]) == (row["case"], row["mode"])]
        (softmax,) = [r for r in same if r["mechanism"] == "softmax"]
        assert row["over_softmax"] == row["median_ms"] / softmax["median_ms"]
        assert row["memory_over_softmax"] == row["peak_bytes"] / softmax["peak_bytes"]
        linear = row["mechanism"] != "softmax"
        assert row["on_kernels"] is (False if linear else None)
        assert all(text.startswith("chunked: " if linear else "scaled_dot") for text in row["explain"])


@pytest.mark.parametrize(
    ("fault", "worst"), [("the loss is off", "loss"), ("a gradient is missing", "gradient of embedding.weight")]
)
@pytest.mark.parametrize("config", [replace(SMALL, only=("language-8192-b1",), mechanisms=("elu",)), TRAINING])
def test_a_step_that_is_wrong_is_not_timed(rows_of, monkeypatch, tmp_path, fault, worst, config):
    def compile_wrongly(host):
        right, embedding = host.head, host.embedding.forward
        if fault == "the loss is off":
            host.head = lambda *args: right(*args) * 1.01
        else:
            host.embedding.forward = lambda inputs: embedding(inputs).detach()

    monkeypatch.setattr(Host, "compile_parts", compile_wrongly)
    rows = rows_of(config, tmp_path, code=1)
    rows = [row for row in rows if row["status"] != "absent"]
    assert statuses(rows) == {("softmax", "WRONG"), ("elu", "WRONG")}
    for row in rows:
        assert row["reason"].startswith(f"{worst} is off by")
        assert "median_ms" not in row


def test_a_gradient_that_is_missing_or_zero_is_far_off():
    host = CASES[0].quick().create("pola", CPU, 0)
    names = [name for name, _ in host.named_parameters()]
    whole = [torch.tensor(1.0), *(torch.full_like(p, 2.0) for p in host.parameters())]
    exact = by_kind(host, whole)
    kind = next(name for name in exact if name.endswith("*.attn.mechanism.power"))
    assert set(distances(exact, exact).values()) == {0.0}
    first = next(name for name in names if name.endswith("blocks.0.attn.mechanism.power"))
    holes = [torch.zeros_like(v) if n == first else v for n, v in zip(["", *names], whole, strict=True)]
    assert distances(by_kind(host, holes), exact)[kind] > 0.3
    gone = [None if n.endswith("mechanism.power") else v for n, v in zip(["", *names], whole, strict=True)]
    assert distances(by_kind(host, gone), exact)[kind] == float("inf")


@pytest.mark.parametrize(("mechanism", "autocast"), [("mirror", False), ("gated-head", False), ("gated-head", True)])
def test_the_truth_of_a_step_holds_right_ones_and_finds_wrong_ones(mechanism, autocast):
    """Of a backbone, BatchNorm over the whole batch, and of a decoder in another form."""
    text = ModelCase("text", 2, tokens=257, decoder=replace(TINY, width=64, heads=1), depth=30)
    case = text if mechanism == "gated-head" else backbone_case("mirrorla_xtiny-224").quick()
    checked = case.checked
    batch = case.draw(CPU, 0)
    truth = StepTruth(checked.create(mechanism, CPU, 0, "chunked"), batch, autocast, "few blocks")
    host = checked.create(mechanism, CPU, 0, "recurrent" if case.tokens else "auto")
    assert len(host.blocks) < 10
    verdict = truth.check(host)
    assert verdict.ok, verdict
    assert verdict.budget < (0.1 if autocast else 1e-4)
    assert verdict.against == "fp64, few blocks"
    parameter = next(p for name, p in host.named_parameters() if ".attn." in name and p.ndim == 2)
    parameter.register_hook(lambda grad: (0.3 if autocast else 0.99) * grad)
    assert not truth.check(host).ok


def test_what_attention_takes_is_heard(rows_of, monkeypatch, tmp_path):
    """Two of four stages of this hybrid are softmax and call no linear attention."""
    case = backbone_case("nalaformer_xtiny-224").quick()
    found = forms(case.create("nala", CPU, 0), "nala", case.draw(CPU, 0), autocast=False)
    assert sum(found["explain"].values()) == 2
    assert found["on_kernels"] is False  # on a CPU; on a GPU both calls would have to say triton
    monkeypatch.setattr(Models, "fill", lambda self, case, work, row: row.update(status="not on kernels"))
    rows_of(replace(SMALL, modes=("compiled",)), tmp_path, code=1)


def test_names_and_groups():
    assert select(()) == list(CASES)
    assert len(select(("backbones",))) == len(SMALLEST) * len(PIXELS)
    assert [c.name for c in select(("backbones-512", "vit-224"))] == [
        "vit-224", *(f"{model}-512" for model in SMALLEST)
    ]  # fmt: skip
    assert len(select(("presets-1024",))) == len(TIMM_MODELS)
    for name, model in TIMM_MODELS.items():  # every preset can be asked for, beside its twin
        case = backbone_case(f"{name.removeprefix('linattn_')}-1024")
        assert case.mechanisms == ("softmax", model.mechanism)
        assert (case.pixels, case.unit, case.units) == (1024, "images", case.batch)
    for wrong in ("nalaformer_tiny-225", "nalaformer-224", "backbones-100", "vit-384"):
        with pytest.raises(OptionError, match="such as nalaformer_tiny-384"):
            select((wrong,))


@pytest.mark.parametrize("model", ["rala_small", "polaformer_swin_tiny", "qtvit_1", "deit_tiny_lion"])
def test_the_twin_differs_in_its_mechanism_alone_and_what_is_checked_has_all_kinds_of_blocks(model):
    case = backbone_case(f"{model}-224")
    meta = torch.device("meta")
    hosts = [case.create(name, meta, 0) for name in case.mechanisms]
    names = [{m.info.name for m in host.modules() if isinstance(m, Mechanism)} for host in hosts]
    assert names[0] == {"softmax"}
    assert case.mechanisms[1] in names[1]
    whole, part = hosts[1].blocks, case.checked.create(case.mechanisms[1], meta, 0).blocks
    assert len(hosts[0].blocks) == len(whole) > len(part)
    assert {type(block) for block in whole} == {type(block) for block in part}
    if "lion" not in model:  # whose order of tokens is another in every second block
        assert {str(block) for block in part} <= {str(block) for block in whole}


def test_backbones_are_measured_and_drawn_beside_their_twins(rows_of, tmp_path):
    names = ("deit_tiny_lion-224", "deit_tiny_lion-512")
    config = replace(SMALL, only=names, mechanisms=("relu",), modes=("called",))
    rows = rows_of(config, tmp_path)
    assert {row["status"] for row in rows} == {"ok"}
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")


def test_throughput_has_as_many_tokens_of_the_same_text_at_every_length():
    cases = {case["length"]: TRAINING.model(case) for case in TRAINING.cases()}
    batches = {T: case.draw(CPU, 0) for T, case in cases.items()}
    assert {T: tuple(inputs.shape) for T, (inputs, _) in batches.items()} == {8: (4, 8), 16: (2, 16)}
    assert torch.equal(batches[8][0].flatten(), batches[16][0].flatten())
    assert torch.equal(batches[8][0].flatten()[1:], batches[8][1].flatten()[:-1])
    assert Throughput(device="cpu", quick=True).filled().tokens == 64


def test_training_rows_are_checked_timed_weighed_and_drawn(rows_of, monkeypatch, tmp_path):
    rows = rows_of(TRAINING, tmp_path)
    assert [(row["mechanism"], row["length"], row["batch"]) for row in rows] == [
        ("softmax", 8, 4), ("softmax", 16, 2), ("elu", 8, 4), ("elu", 16, 2)
    ]  # fmt: skip
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert 0 < row["error"] <= row["budget"] < 1e-4
        assert row["first_seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(32000 / row["median_ms"])
        assert row["peak_bytes"] > 4 * row["parameters"]  # gradients of all of them at the least
        softmax = next(r for r in rows if (r["mechanism"], r["length"]) == ("softmax", row["length"]))
        assert row["of_softmax"] == row["median_ms"] / softmax["median_ms"]
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(Throughput, "learning_rate", float("inf"))
    rows = rows_of(replace(TRAINING, mechanisms=(), lengths=(16,)), tmp_path / "inf", code=1)
    assert [row["reason"] for row in rows] == ["the loss is not finite after some steps"]


def test_an_optimizer_takes_its_step():
    case = TRAINING.model({"length": 8})
    host, batch = case.create("elu", CPU, 0), case.draw(CPU, 0)
    before = [p.detach().clone() for p in host.parameters()]
    _, *gradients = make_step(host, batch, False)()
    make_step(host, batch, False, torch.optim.SGD(host.parameters(), 1.0))()
    for old, new, gradient in zip(before, host.parameters(), gradients, strict=True):
        assert torch.allclose(new, old - gradient, atol=1e-6)
        assert new.grad is None
