"""`linattn models`: loss and gradients that are checked, backbones beside their twins, forms that are heard."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.bench.running import rows_of, statuses
from linattn.lab.bench import models
from linattn.lab.bench.check import by_kind, distances
from linattn.lab.bench.hosts import (
    CASES,
    PIXELS,
    SMALLEST,
    ImageHost,
    backbone_case,
    create_image_host,
    draw_images,
    select,
)  # fmt: skip
from linattn.lab.bench.language import TINY, create_model, draw_text
from linattn.lab.bench.models import Models, goals
from linattn.lab.bench.steps import StepTruth, compile_host, forms, make_step
from linattn.mechanisms.base import Mechanism
from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.options import OptionError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SMALL = Models(device="cpu", only=("vit-224",), mechanisms=("pola",), modes=("compiled", "cuda-graph"), quick=True)


OTHERS = {("images", "gated-head"), ("tokens", "relu")}


def test_every_row_is_checked_timed_and_weighed(tmp_path):
    rows = rows_of(replace(SMALL, only=("vit-224", "language-8192-b1"), mechanisms=("relu", "gated-head")), tmp_path)
    absent = [row for row in rows if row["mode"] == "cuda-graph"]
    assert {(row["status"], row["reason"]) for row in absent} == {("absent", "CUDA graphs need a GPU")}
    rows = [row for row in rows if row["mode"] == "compiled" and (row["unit"], row["mechanism"]) not in OTHERS]
    assert [(row["case"], row["mechanism"]) for row in rows] == [
        ("vit-224", "softmax"), ("vit-224", "relu"), ("language-8192-b1", "softmax"), ("language-8192-b1", "gated-head")
    ]  # fmt: skip
    for row in rows:
        assert row["status"] == "ok", row
        assert 0 < row["error"] <= row["budget"] < 1e-3
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        units = 2 * 24 if row["unit"] == "tokens" else 2
        assert row["per_second"] == pytest.approx(1000 * units / row["median_ms"])
        assert row["peak_bytes"] > 4 * row["parameters"]  # gradients of all of them at the least
        softmax = next(r for r in rows if (r["case"], r["mechanism"]) == (row["case"], "softmax"))
        assert row["over_softmax"] == row["median_ms"] / softmax["median_ms"]
        linear = row["mechanism"] != "softmax"
        assert row["on_kernels"] is (False if linear else None)
        assert all(text.startswith("chunked: " if linear else "scaled_dot") for text in row["explain"])


def test_a_deep_decoder_is_held_to_what_its_first_blocks_give():
    """In bf16; of all blocks plain PyTorch misses so much that twice of it would be no bound."""
    size = replace(TINY, width=64, heads=1, kv_heads=1)
    text = draw_text(size, (2, 257), CPU, 0)
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    create = lambda impl: create_model(size, "gated-head", CPU, 0, impl=impl, depth=30)  # noqa: E731
    truth = StepTruth(create, "gated-head", *batch, True, blocks=2, piece=1, words="two blocks")
    host = create("recurrent")
    verdict = truth.check(host, host)
    assert verdict.ok
    assert verdict.budget < 0.1
    assert len(host.blocks) == 30
    parameter = next(p for name, p in host.named_parameters() if name.startswith("blocks.0.attn.") and p.ndim == 2)
    parameter.register_hook(lambda grad: 0.7 * grad)
    assert not truth.check(host, host).ok


def test_a_step_that_is_off_by_a_percent_is_wrong(monkeypatch, tmp_path):
    def compile_wrongly(host, mode, backend):
        return lambda inputs, targets: host(inputs, targets) * 1.01

    monkeypatch.setattr(models, "compile_host", compile_wrongly)
    rows = rows_of(replace(SMALL, modes=("compiled",)), tmp_path, code=1)
    assert statuses(rows, "mechanism") == {("softmax", "WRONG"), ("pola", "WRONG")}
    assert "is off by 1.0e-02" in rows[0]["reason"]


def test_a_gradient_that_is_missing_or_zero_is_far_off():
    host = create_image_host(CASES[0].quick(), "pola", CPU, 0)
    names, kind = [name for name, _ in host.named_parameters()], "gradient of blocks.*.attn.mechanism.power"
    whole = [torch.tensor(1.0), *(torch.full_like(p, 2.0) for p in host.parameters())]
    exact = by_kind(host, whole)
    kind = next(name for name in exact if name.endswith("*.attn.mechanism.power"))
    assert set(distances(exact, exact).values()) == {0.0}
    first = next(name for name in names if name.endswith("blocks.0.attn.mechanism.power"))
    holes = [torch.zeros_like(v) if n == first else v for n, v in zip(["", *names], whole, strict=True)]
    assert distances(by_kind(host, holes), exact)[kind] > 0.3
    gone = [None if n.endswith("mechanism.power") else v for n, v in zip(["", *names], whole, strict=True)]
    assert distances(by_kind(host, gone), exact)[kind] == float("inf")


def test_what_attention_takes_is_heard(monkeypatch, tmp_path):
    """Two of four stages of this hybrid are softmax and call no linear attention."""
    case = backbone_case("nalaformer_xtiny-224").quick()
    found = forms(create_image_host(case, "nala", CPU, 0), "nala", *draw_images(case, CPU, 0), autocast=False)
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


@pytest.mark.parametrize("model", ["rala_small", "polaformer_pvt_tiny", "qtvit_1", "deit_tiny_lion"])
def test_the_twin_differs_in_its_mechanism_alone(model):
    case = backbone_case(f"{model}-224")
    with torch.device("meta"):
        hosts = [ImageHost(case, name, "auto", None) for name in case.mechanisms]
    names = [{m.info.name for m in host.modules() if isinstance(m, Mechanism)} for host in hosts]
    assert names[0] == {"softmax"}
    assert case.mechanisms[1] in names[1]
    depths = [len(host.blocks) for host in hosts]
    assert depths[0] == depths[1] > 4


@pytest.mark.parametrize("name", ["polaformer_swin_tiny", "qtvit_1", "rala_tiny"])
def test_the_model_that_is_checked_has_all_kinds_of_blocks(name):
    case = backbone_case(f"{name}-224")
    with torch.device("meta"):
        whole, part = (ImageHost(case, case.mechanisms[1], "auto", depth) for depth in (None, case.checked_depth))
    kinds = [{str(block) for block in host.blocks} for host in (whole, part)]
    assert len(part.blocks) < len(whole.blocks)
    assert {type(block) for block in whole.blocks} == {type(block) for block in part.blocks}
    assert kinds[1] <= kinds[0]


def test_a_backbone_is_right_with_the_statistics_of_its_batch():
    """BatchNorm over the whole batch, in the step and in the truth; a gradient that is off is found."""
    case = backbone_case("mirrorla_xtiny-224").quick()
    batch = draw_images(case, CPU, 0)
    create = lambda impl: create_image_host(case, "mirror", CPU, 0, impl=impl)  # noqa: E731
    truth = StepTruth(create, "mirror", *batch, False, blocks=None, piece=case.batch, words="")
    host = create("auto")
    compile_host(host, "eager-graph", "eager")
    assert truth.check(host, host).ok
    next(iter(host.parameters())).register_hook(lambda grad: 1.01 * grad)
    assert not truth.check(host, host).ok


def test_backbones_are_measured_and_drawn_beside_a_twin_that_does_not_fit(tmp_path, monkeypatch):
    config = replace(
        SMALL, only=("deit_tiny_lion-224", "deit_tiny_lion-512"), mechanisms=("relu",), modes=("compiled",)
    )
    rows = rows_of(config, tmp_path / "fits")
    assert {row["status"] for row in rows} == {"ok"}
    assert (tmp_path / "fits" / "models.png").read_bytes().startswith(b"\x89PNG")

    def step(host, loss_of, *others, **options):
        if all(m.info.name == "softmax" for m in host.modules() if isinstance(m, Mechanism)):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 200 GiB")
        return make_step(host, loss_of, *others, **options)

    monkeypatch.setattr(models, "make_step", step)
    rows = rows_of(replace(config, only=("deit_tiny_lion-224",)), tmp_path / "not")
    assert [(row["mechanism"], row["status"], row["reason"]) for row in rows] == [
        ("softmax", "out of memory", "Tried to allocate 200 GiB"), ("relu", "ok", "")
    ]  # fmt: skip
    assert rows[1]["over_softmax"] is None


def test_goals_and_the_readme(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from readme_models import backbones_table, models_text

    meta = {"device": "a GPU", "date": "2026-01-01T00:00", "command": "linattn models", "precision": "bf16"}
    meta |= {"versions": {"torch": "2", "triton": "3"}}
    common = {"case": "vit-224", "shape": "ViT-small, 256 images of 224 pixels", "unit": "images", "error": 1e-3,
              "budget": 4e-3, "mode": "compiled"}  # fmt: skip
    rows = []
    for name, ms, on_kernels in (("softmax", 100.0, None), ("relu", 80.0, True), ("nala", 120.0, True)):
        own = {"median_ms": ms, "per_second": 256e3 / ms, "peak_bytes": 2**31, "on_kernels": on_kernels}
        rows.append(common | own | {"mechanism": name, "status": "ok", "over_softmax": ms / 100})
    rows.append(common | {"mechanism": "relu", "mode": "cuda-graph", "status": "absent"})
    found = {(g["mechanism"], g["mode"]): (g["value"], g["reached"]) for g in goals(rows)}
    assert found == {("relu", "compiled"): (0.8, True), ("nala", "compiled"): (1.2, False)}
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"meta": meta, "rows": rows}))
    text = models_text(path)
    shape = "ViT-small, 256 images of 224 pixels"
    assert f"| {shape} | `softmax` | 100 |  |  |  | 2,560 images | 2.0 |  |" in text
    assert f"| {shape} | `relu` | 80.0 | 0.80 | absent |  | 3,200 images | 2.0 |  |" in text
    assert "1 of 2 beat the same model on softmax. Not: `nala` in vit-224, compiled: 1.20 of its time." in text
    assert "in 2 of 2 rows of linear attention every call took kernels" in text
    backbone = [row | {"case": "rala_tiny-224", "parameters": 7_000_000} for row in rows[:2]]
    table = backbones_table(backbone, "compiled")
    assert "| `rala_tiny` | `relu` | 7.0 M | 3,200/s (1.25x), 2.0 GiB (1.00x) |" in table
    backbone[0] |= {"status": "out of memory", "median_ms": None, "peak_bytes": None}
    assert "3,200/s, 2.0 GiB; softmax: out of memory" in backbones_table(backbone, "compiled")
