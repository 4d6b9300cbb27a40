"""Backbones in the race of models: by name, beside their twin on softmax, with a chart over the sizes of images."""

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from linattn.lab.bench.models.cases import CASES, GROUP_MODELS, PIXELS, backbone_case, select
from linattn.lab.bench.models.chart import draw_sweep, sweep_points
from linattn.lab.bench.models.check import ModelTruth
from linattn.lab.bench.models.hosts import create_host, draw_batch
from linattn.lab.bench.models.look import look_at
from linattn.lab.bench.models.rows import ModelRow, ModelsResult
from linattn.lab.bench.models.screen import models
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.steps import make_step
from rich.console import Console

from linattn.lab.bench.models import subject as subject_module
from linattn.mechanisms.base import Mechanism
from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.options import OptionError

CPU = torch.device("cpu")


def test_names_and_groups():
    assert select(()) == list(CASES)
    assert len(select(("backbones",))) == len(GROUP_MODELS) * len(PIXELS)
    assert [c.name for c in select(("backbones-512", "vit-224"))] == [
        "vit-224", *(f"{model}-512" for model in GROUP_MODELS),
    ]  # fmt: skip
    assert len(select(("presets-1024",))) == len(TIMM_MODELS)
    for name, model in TIMM_MODELS.items():  # every preset can be asked for, beside its twin
        case = backbone_case(f"{name.removeprefix('linattn_')}-1024")
        assert case.mechanisms == ("softmax", model.mechanism)
        assert (case.pixels, case.unit, case.units) == (1024, "images", case.batch)
    for wrong in ("nalaformer_tiny-225", "nalaformer-224", "backbones-100", "vit-384"):
        with pytest.raises(OptionError, match="such as nalaformer_tiny-384") as caught:
            select((wrong,))
        assert caught.value.option == "cases"


@pytest.mark.parametrize("model", ["rala_small", "polaformer_pvt_tiny", "qtvit_1", "deit_tiny_lion"])
def test_the_twin_differs_in_its_mechanism_alone(model):
    case = backbone_case(f"{model}-224")
    with torch.device("meta"):
        hosts = [create_host(case, name, torch.device("meta"), 0) for name in case.mechanisms]
    names = [{m.info.name for m in host.modules() if isinstance(m, Mechanism)} for host in hosts]
    assert names[0] == {"softmax"}
    assert case.mechanisms[1] in names[1]
    depths = [len(host.blocks) for host in hosts]
    assert depths[0] == depths[1] > 4


def test_softmax_stages_of_a_hybrid_are_not_missed_by_kernels():
    """Two of its four stages are softmax and call no linear attention: what is linear is heard completely."""
    case = backbone_case("nalaformer_xtiny-224").quick()
    host = create_host(case, "nala", CPU, 0)
    look = look_at(host, "nala", *draw_batch(case, CPU, 0), autocast=False)
    assert sum(look.explain.values()) == 2
    assert look.on_kernels is False  # on a CPU; on a GPU both calls would have to say triton


def test_a_backbone_is_right_with_the_statistics_of_its_batch():
    """BatchNorm over the whole batch, in the step and in the truth; a gradient that is off is found."""
    case = backbone_case("mirrorla_xtiny-224").quick()
    inputs, targets = draw_batch(case, CPU, 0)
    truth, host = ModelTruth(case, "mirror", inputs, targets, 0, autocast=False), create_host(case, "mirror", CPU, 0)
    found = make_step(host, host, inputs, targets, autocast=False)()
    assert truth.check(host, found).ok
    assert not truth.check(host, [g if g is None else 1.01 * g for g in found]).ok


def test_backbones_are_measured_resumed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed: no chart")
    path, screen = tmp_path / "models.json", StringIO()
    config = ModelsConfig(
        device="cpu", cases=("deit_tiny_lion-224",), mechanisms=("relu",), modes=("compiled",), backend="eager",
        quick=True,
    )  # fmt: skip
    assert models(config, path, Console(file=screen, width=150)) == 0, screen.getvalue()
    first = json.loads(path.read_text())["rows"]
    assert [row["mechanism"] for row in first] == ["softmax", "relu"]
    assert all(0 < row["error"] <= row["budget"] and row["peak_bytes"] > 0 for row in first)
    more = replace(config, cases=("deit_tiny_lion-224", "deit_tiny_lion-512"))
    assert models(more, path, Console(file=screen, width=150), resume=True) == 0, screen.getvalue()
    rows = json.loads(path.read_text())["rows"]
    assert rows[:2] == first
    assert [(row["case"], row["mechanism"], row["status"]) for row in rows[2:]] == [
        ("deit_tiny_lion-512", "softmax", "ok"), ("deit_tiny_lion-512", "relu", "ok"),
    ]  # fmt: skip
    assert f"chart: {path.with_suffix('.png')}" in screen.getvalue().replace("\n", "")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_does_not_fit_is_told_once_and_left_alone(tmp_path, monkeypatch):
    """Its twin is measured, the reason is in the row, the exit code is that of a right run, --resume skips it."""
    tried = []

    def step(host, loss_of, inputs, targets, autocast):
        names = {module.info.name for module in host.modules() if isinstance(module, Mechanism)}
        tried.append(names)
        if names == {"softmax"}:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 200 GiB")
        return make_step(host, loss_of, inputs, targets, autocast)

    monkeypatch.setattr(subject_module, "make_step", step)
    path, screen = tmp_path / "models.json", StringIO()
    config = ModelsConfig(
        device="cpu", cases=("deit_tiny_lion-224",), mechanisms=("relu",), modes=("compiled",), backend="eager",
        quick=True,
    )  # fmt: skip
    assert models(config, path, Console(file=screen, width=150)) == 0, screen.getvalue()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("out of memory", "compiling: CUDA out of memory. Tried to allocate 200 GiB"), ("ok", ""),
    ]  # fmt: skip
    assert "out of memory: compiling" in " ".join(screen.getvalue().split())
    assert tried.count({"softmax"}) == 1
    known = len(tried)
    assert models(config, path, Console(file=screen, width=150), resume=True) == 0
    assert json.loads(path.read_text())["rows"] == rows
    assert len(tried) == known, "not again"
    subject = subject_module.Subject(config, config.selected()[0], "softmax", lambda _: None)
    for mode in ("compiled", "compiled"):  # another mode of the same model would not fit either
        row = ModelRow("deit_tiny_lion-224", "softmax", mode)
        subject.measure(row)
        assert row.status == "out of memory"
    assert tried.count({"softmax"}) == 2


def test_points_of_the_chart(tmp_path):
    meta = {"device": "a GPU", "precision": "bf16", "settings": {"quick": False}}
    result = ModelsResult(meta)
    for pixels, ms, share, memory in ((1024, 400.0, 0.5, 0.25), (224, 10.0, 1.2, 1.0)):
        own = {"unit": "images"}
        case = f"rala_tiny-{pixels}"
        result.put(ModelRow(case, "softmax", "compiled", median_ms=ms, peak_bytes=2**30, **own))
        peak = int(memory * 2**30)
        result.put(ModelRow(case, "rala", "compiled", median_ms=share * ms, peak_bytes=peak, **own))
    result.put(ModelRow("rala_tiny-512", "rala", "compiled", median_ms=1.0, unit="images"))  # its twin did not fit
    result.put(ModelRow("language-8192-b1", "gated", "compiled", median_ms=1.0, unit="tokens"))
    points = sweep_points(result, "compiled")
    assert list(points) == ["rala_tiny, rala"]
    times, peaks = points["rala_tiny, rala"]
    assert [(p, pytest.approx(s)) for p, s in times] == [(1024, 0.5), (224, 1.2)]
    assert [(p, pytest.approx(s)) for p, s in peaks] == [(1024, 0.25), (224, 1.0)]
    assert not draw_sweep(ModelsResult(meta), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
