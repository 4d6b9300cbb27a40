import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from linattn.lab.bench.models.beforehand import prepare
from linattn.lab.bench.models.cases import CASES, select
from linattn.lab.bench.models.check import ModelTruth, by_kind, checked_part, distances
from linattn.lab.bench.models.hosts import LanguageHost, create_host, draw_batch
from linattn.lab.bench.models.look import look_at
from linattn.lab.bench.models.profiling import kind_of, own_kernels, profile_step, summarise
from linattn.lab.bench.models.rows import ModelRow, ModelsResult
from linattn.lab.bench.models.run import run_models
from linattn.lab.bench.models.screen import models
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.start import run_apart
from linattn.lab.bench.models.steps import make_step
from linattn.lab.bench.models.subject import judge
from rich.console import Console

from lab.bench import fake_children as fake
from linattn.lab.bench.models import subject as subject_module
from linattn.support.options import OptionError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SMALL = ModelsConfig(
    device="cpu", cases=("vit-224",), mechanisms=("pola",), modes=("compiled",), backend="eager", quick=True
)
LANGUAGE = replace(SMALL, cases=("language-8192-b1",), mechanisms=("gated-head",))


def opened(config):
    result = ModelsResult(config.describe(["test"]))
    result.meta["runs"] = [{"date": "", "command": ""}]
    return result


@pytest.mark.parametrize("config", [SMALL, LANGUAGE], ids=["vision", "language"])
def test_every_row_is_checked_timed_weighed_and_profiled(config):
    result, seen = opened(config), []
    run_models(config, result, on_row=seen.append)
    assert seen == result.rows
    (case,) = config.selected()
    layers = 3 if case.kind == "vision" else 2
    assert [row.mechanism for row in seen] == ["softmax", *config.mechanisms]
    for row in seen:
        assert row.status == "ok", row.reason
        assert 0 < row.error <= row.budget
        assert row.checked_against.startswith("fp64")
        assert 0 < row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.per_second == pytest.approx(case.units / row.median_ms * 1000)
        weights = sum(p.numel() for p in create_host(case, row.mechanism, CPU, 0).parameters())
        assert row.parameters == weights
        assert row.peak_bytes > 4 * weights  # gradients of all of them at the least
        assert sum(row.profile["shares"].values()) == pytest.approx(1)
        assert row.profile["top"][0]["share"] >= row.profile["top"][-1]["share"] > 0
    linear = seen[1]
    assert (seen[0].on_kernels, linear.on_kernels) == (None, False)
    assert sum(linear.explain.values()) >= layers
    assert all(text.startswith("chunked: ") for text in linear.explain)
    assert linear.feature_map == "compiled"
    assert result.over_softmax(linear) == linear.median_ms / seen[0].median_ms


def test_a_deep_decoder_is_held_to_what_its_first_blocks_give():
    """In bf16; of all blocks plain PyTorch misses so much that twice of it would be no bound."""
    (case,) = LANGUAGE.selected()
    case = replace(case, depth=30, tokens=256, width=64, heads=1)
    inputs, targets = draw_batch(case, CPU, 0)
    truth = ModelTruth(case, "gated-head", inputs, targets, 0, autocast=True)
    host = create_host(case, "gated-head", CPU, 0, impl="recurrent")
    with checked_part(host, case):
        assert len(host.blocks) == 2
        found = make_step(host, host, inputs, targets, True)()
        verdict = truth.check(host, found)
        assert verdict.ok
        assert verdict.budget < 0.1
        assert verdict.against.endswith("its first 2 blocks")
        places = {name: n for n, (name, _) in enumerate(host.named_parameters(), 1)}
        wrong = list(found)
        wrong[places["blocks.0.attn.qkv.weight"]] = 0.9 * wrong[places["blocks.0.attn.qkv.weight"]]
        assert not truth.check(host, wrong).ok
    assert len(host.blocks) == 30


def test_a_step_that_is_off_by_a_percent_is_wrong(monkeypatch):
    def compile_wrongly(host, mode, backend):
        return lambda inputs, targets: host(inputs, targets) * 1.01

    monkeypatch.setattr(subject_module, "compile_host", compile_wrongly)
    result = run_models(SMALL, opened(SMALL))
    assert {row.status for row in result.rows} == {"WRONG"}
    assert "is off by 1.0e-02" in result.rows[0].reason
    assert not result.right


def test_a_gradient_that_is_missing_or_zero_is_far_off():
    case = CASES[0].quick()
    host = create_host(case, "pola", CPU, 0)
    names = [name for name, _ in host.named_parameters()]
    whole = [torch.tensor(1.0), *(torch.full_like(p, 2.0) for p in host.parameters())]
    exact = by_kind(host, whole)
    assert "gradient of model.blocks.*.attn.mechanism.power" in exact
    assert set(distances(exact, exact).values()) == {0.0}
    holes = [
        v if n != "model.blocks.0.attn.mechanism.power" else torch.zeros_like(v)
        for n, v in zip(["", *names], whole, strict=True)
    ]
    assert distances(by_kind(host, holes), exact)["gradient of model.blocks.*.attn.mechanism.power"] > 0.3
    gone = [None if n.endswith("mechanism.power") else v for n, v in zip(["", *names], whole, strict=True)]
    assert distances(by_kind(host, gone), exact)["gradient of model.blocks.*.attn.mechanism.power"] == float("inf")


def test_the_language_model_has_135_million_parameters_and_sees_the_past_alone():
    (case,) = select(("language-8192-b4",))
    with torch.device("meta"):
        host = LanguageHost(case, "softmax", "auto", None)
    assert sum(p.numel() for p in host.parameters()) == pytest.approx(135e6, rel=0.01)
    small = case.quick()
    inputs, targets = draw_batch(small, CPU, 0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for mechanism in ("softmax", "gated-head"):
        host = create_host(small, mechanism, CPU, 0)
        changed = inputs.clone()
        changed[:, 12:] = (changed[:, 12:] + 1) % small.vocabulary
        first, second = (host.block(0, host.stem(x)) for x in (inputs, changed))
        assert torch.equal(first[:, :12], second[:, :12])
        assert not torch.allclose(first[:, 12:], second[:, 12:])


def test_what_runs_beside_kernels_is_seen_and_views_are_not():
    case = CASES[0].quick()
    inputs, targets = draw_batch(case, CPU, 0)
    found = look_at(create_host(case, "relu", CPU, 0), "relu", inputs, targets, autocast=False)
    assert found.beside == {"aten.relu": 6}  # of q and of k, in 3 blocks
    assert found.on_kernels is False
    softmax = look_at(create_host(case, "softmax", CPU, 0), "softmax", inputs, targets, autocast=False)
    assert softmax.beside == {}
    assert list(softmax.explain.values()) == [3]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::pow_tensor>", "eager elementwise"),
        ("triton_poi_fused_add_mul_3", "inductor"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_kernel", "flash softmax"),
        ("Memset (Device)", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copies and fills"),
        ("void at::native::reduce_kernel<512, 1>", "eager"),
        ("something", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, kind):
    assert kind_of(kernel) == kind


def test_our_kernels_are_known_and_eager_ones_named():
    assert own_kernels()
    own = next(iter(own_kernels()))
    eager = "void at::native::vectorized_elementwise_kernel<4>"
    found = summarise({own: [750.0, 3], eager: [250.0, 2]})
    assert found["shares"] == {"linattn": 0.75, "eager elementwise": 0.25}
    assert found["eager_elementwise"] == {eager: 2}
    assert found["top"][0] == {"kernel": own, "kind": "linattn", "calls": 3, "ms": 0.75, "share": 0.75}
    products = profile_step(lambda: torch.ones(64, 64) @ torch.ones(64, 64), CPU)
    assert "matrix product" in products["shares"]


def test_a_map_is_eager_if_every_call_of_attention_has_a_kernel_of_it():
    eager, fill = (f"void at::native::vectorized_elementwise_kernel<4, {x}>" for x in ("pow", "FillFunctor<float>"))
    for kernels, where in (({eager: 12}, "eager"), ({eager: 1}, "compiled"), ({fill: 36}, "compiled")):
        row = ModelRow("c", "relu", "compiled", explain={"triton: fast": 12}, beside={"aten.mul": 12})
        row.profile = {"eager_elementwise": kernels}
        assert row.feature_map == where


def test_kernels_are_asserted_on_a_gpu():
    row = ModelRow("c", "relu", "compiled", on_kernels=False, explain={"chunked: why": 12, "triton: fast": 1})
    judge(row, right=True, on_gpu=False)
    assert row.status == "ok"
    judge(row, right=True, on_gpu=True)
    assert (row.status, row.reason) == ("not on kernels", "chunked: why")
    served = ModelRow("c", "relu", "compiled", on_kernels=True, explain={"triton: fast": 12})
    judge(served, right=True, on_gpu=True)
    assert served.status == "ok"


def test_interrupted_resumed_failed_and_left_out(monkeypatch, tmp_path):
    path, screen = tmp_path / "models.json", StringIO()
    right = subject_module.create_host

    def interrupted(case, mechanism, *args, **options):
        if mechanism == "pola":
            raise KeyboardInterrupt
        return right(case, mechanism, *args, **options)

    monkeypatch.setattr(subject_module, "create_host", interrupted)
    config = replace(SMALL, mechanisms=("pola", "relu"), modes=("compiled", "cuda-graph"))
    assert models(config, path, Console(file=screen, width=150)) == 130
    kept = json.loads(path.read_text())
    assert kept["meta"]["interrupted"] is True
    assert [(r["mechanism"], r["mode"], r["status"]) for r in kept["rows"]] == [
        ("softmax", "compiled", "ok"), ("softmax", "cuda-graph", "absent"),
    ]  # fmt: skip

    def broken(case, mechanism, *args, **options):
        if mechanism == "pola":
            raise RuntimeError("no such\nkernel")
        return right(case, mechanism, *args, **options)

    monkeypatch.setattr(subject_module, "create_host", broken)
    assert models(config, path, Console(file=screen, width=150), resume=True) == 1
    rows = json.loads(path.read_text())["rows"]
    assert rows[0] == kept["rows"][0]
    assert {r["reason"] for r in rows if r["status"] == "failed"} == {"RuntimeError: no such kernel"}
    assert "pola in vit-224, compiled" in screen.getvalue()

    monkeypatch.setattr(subject_module, "create_host", right)
    assert models(replace(config, seconds=1e-9), path, Console(file=screen, width=150), resume=True) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {(r["mode"], r["status"]) for r in rows if r["mechanism"] == "pola"} == {
        ("compiled", "left out"), ("cuda-graph", "absent"),
    }  # fmt: skip
    assert "left out for want of time" in screen.getvalue()
    assert models(config, path, Console(file=screen, width=150), resume=True) == 0
    last = json.loads(path.read_text())
    assert {r["status"] for r in last["rows"] if r["mode"] == "compiled"} == {"ok"}
    assert len(last["meta"]["runs"]) == 4
    with pytest.raises(OptionError, match="other settings"):
        models(replace(config, seed=1), path, Console(file=screen), resume=True)


@pytest.mark.usefixtures("quick_children")
def test_a_crash_costs_one_row_and_models_are_compiled_beforehand():
    result, rows = opened(SMALL), []
    config = replace(SMALL, processes=1)
    run_apart(
        replace(config, processes=0), result, on_row=rows.append, on_work=lambda what: None,
        target=fake.models_that_crash_once,
    )  # fmt: skip
    assert [(row.mechanism, row.status) for row in rows] == [("softmax", "failed"), ("pola", "ok")]
    assert rows[0].reason == "the process was ended by SIGKILL"
    config = replace(config, mechanisms=("softmax",))
    fresh = opened(config)
    prepare(config, fresh, 60, lambda what: None)
    assert fresh.checked == {}  # of compiled steps nothing is
    note = fresh.meta["runs"][-1]["compiled_beforehand"]
    assert (note["of"], note["ended"], note["failed"]) == (1, 1, [])


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"quick": False}, "device"),
        ({"cases": ("vit-1",)}, "cases"),
        ({"mechanisms": ("nobody",)}, "mechanisms"),
        ({"modes": ("fast",)}, "modes"),
        ({"modes": ()}, "modes"),
        ({"backend": "none"}, "backend"),
        ({"seconds": 0}, "seconds"),
        ({"milliseconds": -1}, "milliseconds"),
        ({"processes": -1}, "processes"),
    ],
)
def test_wrong_settings_name_the_option(change, option):
    with pytest.raises(OptionError) as caught:
        replace(SMALL, **change).check()
    assert caught.value.option == option


def test_goals_and_the_readme(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from readme_models import models_text

    meta = {"device": "a GPU", "date": "2026-01-01T00:00", "command": "linattn models", "precision": "bf16"}
    meta |= {"versions": {"torch": "2", "triton": "3"}, "settings": {"quick": False}}
    common = {"shape": "ViT-small, 256 images of 224 pixels", "unit": "images", "error": 1e-3, "budget": 4e-3}
    profile = {"ms": 1.0, "shares": {}, "top": [], "eager_elementwise": {}}
    result = ModelsResult(meta)
    for name, ms, on_kernels in (("softmax", 100.0, None), ("relu", 80.0, True), ("nala", 120.0, True)):
        own = {"median_ms": ms, "per_second": 256e3 / ms, "peak_bytes": 2**31, "on_kernels": on_kernels}
        explain = {} if name == "softmax" else {"triton: fast": 12}
        result.rows.append(ModelRow("vit-224", name, "compiled", **own, **common, profile=profile, explain=explain))
    result.rows.append(ModelRow("vit-224", "relu", "cuda-graph", "absent", "cannot be captured", **common))
    goals = {(g.mechanism, g.mode): (g.value, g.reached) for g in result.goals()}
    assert goals == {("relu", "compiled"): (0.8, True), ("nala", "compiled"): (1.2, False)}
    path = tmp_path / "models.json"
    path.write_text(json.dumps(result.as_json()))
    text = models_text(path)
    shape = "ViT-small, 256 images of 224 pixels"
    assert f"| {shape} | `softmax` | 100 |  |  |  | 2,560 images | 2.0 |  |" in text
    assert f"| {shape} | `relu` | 80.0 | 0.80 | absent |  | 3,200 images | 2.0 | in kernels |" in text
    assert "1 of 2 beat the same model on softmax. Not: `nala` in vit-224, compiled: 1.20 of its time." in text
    assert "in 2 of 2 rows of linear attention every call took kernels" in text
    assert "against plain PyTorch in the same run and used" in text
    result.rows[1].checked_run, result.rows[1].run = 0, 1
    path.write_text(json.dumps(result.as_json()))
    assert "against plain PyTorch by the same code in the same run or an earlier one and used" in models_text(path)
