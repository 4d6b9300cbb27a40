"""Every preset in one sweep: steps that are not compiled, small models that are checked, twins measured once."""

import json
from dataclasses import replace

import pytest
import torch
import typer
from linattn.lab.bench.models.beforehand import check_one, prepare_tasks, warm_one
from linattn.lab.bench.models.cases import CASES, GROUP_MODELS, GROUPS, backbone_case, select, softmax_model
from linattn.lab.bench.models.chart import MOST_LINES, shown_points, sweep_figure, sweep_points
from linattn.lab.bench.models.hosts import HOSTS, create_host, draw_batch
from linattn.lab.bench.models.look import linear_parts, look_at
from linattn.lab.bench.models.rows import ModelRow, ModelsResult
from linattn.lab.bench.models.run import run_models
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.steps import make_step
from linattn.lab.bench.models.subject import Subject
from linattn.lab.bench.models.table import backbones_table
from linattn.lab.cli.bench_models import models
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from linattn.lab.bench.models import run
from linattn.lab.bench.models import subject as subject_module
from linattn.mechanisms.base import LinearBase
from linattn.models.vision.catalog import TIMM_MODELS

CPU, META = torch.device("cpu"), torch.device("meta")
EAGER = "eager-graph"
CONFIG = ModelsConfig(device="cpu", cases=("nalaformer_xtiny-224",), modes=("compiled",), backend="eager", quick=True)
BOTH = replace(CONFIG, cases=("nalaformer_xtiny-224", "nalaformer_xtiny_linear-224"))


def small(model):
    """As deep as it is, on small images."""
    return replace(backbone_case(f"{model}-224"), batch=2, pixels=64)


def opened(config):
    result = ModelsResult(config.describe(["test"]))
    result.meta["runs"] = [{"date": "", "command": ""}]
    return result


def graphs():
    return counters["stats"]["unique_graphs"]


def test_an_eager_step_is_the_plain_model_and_is_not_mixed_up_with_the_compiled_one():
    subject = Subject(CONFIG, small("nalaformer_xtiny"), "nala", lambda what: None)
    counters.clear()
    found = subject._step(EAGER)[0]()
    assert graphs() == 0
    plain = create_host(subject.case, "nala", CPU, 0)
    exact = make_step(plain, plain, subject.inputs, subject.targets, autocast=False)()
    for a, b in zip(found, exact, strict=True):
        assert torch.equal(a, b)
    assert subject._verdict(EAGER).ok
    assert graphs() == 0
    subject._step("compiled")
    compiled = graphs()
    assert compiled > 0
    assert subject._verdict("compiled").ok
    assert graphs() == compiled, "the model that is checked runs the code that is timed"
    assert subject._step("cuda-graph") is subject._step("compiled")
    counters.clear()
    subject._step(EAGER)
    assert graphs() == 0
    torch.compiler.reset()


def test_a_row_says_what_each_part_of_it_took():
    """And nothing of the row before, which may have ended in the middle."""
    subject = Subject(CONFIG, backbone_case("nalaformer_xtiny-224").quick(), "nala", lambda what: None)
    subject._doing = "compiling"
    row = ModelRow("nalaformer_xtiny-224", "nala", "compiled")
    subject.measure(row)
    assert list(row.took) == ["looking at attention", "compiling", "checking", "timing", "profiling"]
    assert row.took["compiling"] >= row.first_seconds > 0
    torch.compiler.reset()


def test_on_a_cpu_graphs_are_absent_and_twins_are_told(tmp_path):
    app = typer.Typer()
    app.command()(models)
    cases = ",".join([*BOTH.cases, "deit_tiny_lion-224"])
    arguments = ["--quick", "--device", "cpu", "--cases", cases, "--modes", EAGER, "--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert [(row["case"], row["mechanism"], row["same_as"]) for row in rows] == [
        ("nalaformer_xtiny-224", "softmax", ""), ("nalaformer_xtiny-224", "nala", ""),
        ("nalaformer_xtiny_linear-224", "softmax", "nalaformer_xtiny-224"), ("nalaformer_xtiny_linear-224", "nala", ""),
        ("deit_tiny_lion-224", "softmax", ""), ("deit_tiny_lion-224", "lion", ""),
    ]  # fmt: skip
    assert {(row["mode"], row["status"], row["reason"]) for row in rows} == {
        (EAGER, "absent", "CUDA graphs need a GPU")
    }


@pytest.mark.parametrize("model", ["nalaformer_tiny", "polaformerpp_b0", "rala_tiny", "mirrorla_tiny"])
def test_models_of_one_name_on_softmax_are_one_model(model):
    hosts = [create_host(backbone_case(f"{name}-224"), "softmax", META, 0) for name in (model, f"{model}_linear")]
    assert repr(hosts[0]) == repr(hosts[1])
    shapes = [[(name, value.shape) for name, value in host.state_dict().items()] for host in hosts]
    assert shapes[0] == shapes[1]


def test_only_stages_are_between_models_of_one_name():
    shared = 0
    for case in select(("presets",)):
        model = softmax_model(case.name)
        other = backbone_case(model)
        if model != case.name:
            shared += 1
            own, twin = TIMM_MODELS[f"linattn_{case.size}"], TIMM_MODELS[f"linattn_{other.size}"]
            assert replace(own, options={}) == replace(twin, options={})
            assert (own.options.keys() | twin.options.keys()) == {"stages"}
            assert (case.pixels, case.batch) == (other.pixels, other.batch)
    assert shared == 4 * sum(name.endswith("_linear") for name in GROUPS["presets"]) == 84
    assert [softmax_model(case.name) for case in CASES] == [case.name for case in CASES]


def test_no_other_models_are_one_on_softmax():
    """Of rala and mirrorla all weights have the same shapes, but one of the two has rotary positions."""
    known: dict[tuple[str, ...], str] = {}
    for model in dict.fromkeys(softmax_model(case.name) for case in select(("presets-224",))):
        host = create_host(backbone_case(model), "softmax", META, 0)
        network = (repr(host), *(f"{name} {tuple(value.shape)}" for name, value in host.state_dict().items()))
        assert known.setdefault(network, model) == model
    assert len(known) == len([name for name in TIMM_MODELS if not name.endswith("_linear")])


def test_a_twin_is_measured_once_and_found_by_all(monkeypatch):
    measured = []

    class Counted(Subject):
        def measure(self, row):
            measured.append((row.case, row.mechanism))
            row.median_ms, row.peak_bytes = 10.0 + len(measured), 2**20 * len(measured)

    monkeypatch.setattr(run, "Subject", Counted)
    result = run_models(BOTH, opened(BOTH))
    first, hybrid, copied, linear = result.rows
    assert measured == [row.key[:2] for row in (first, hybrid, linear)]
    assert (copied.key, copied.same_as) == (("nalaformer_xtiny_linear-224", "softmax", "compiled"), first.case)
    assert (copied.median_ms, copied.peak_bytes, copied.shape[:23]) == (
        first.median_ms, first.peak_bytes, "nalaformer_xtiny_linear",
    )  # fmt: skip
    assert {row.status for row in result.rows} == {"ok"}
    assert result.over_softmax(linear) == linear.median_ms / first.median_ms
    assert result.memory_over_softmax(linear) == linear.peak_bytes / first.peak_bytes
    # Whichever comes first; one that failed, or is a copy itself, is no twin to take.
    row = ModelRow("nalaformer_xtiny-224", "softmax", "compiled")
    own = ModelRow("nalaformer_xtiny_linear-224", "softmax", "compiled", median_ms=1.0)
    assert run.same_model(ModelsResult({}, [own]), row) is own
    for other in (
        replace(own, status="failed"), replace(own, status="left out"), replace(own, same_as="nalaformer_xtiny-224"),
        replace(own, mode=EAGER), replace(own, case="nalaformer_xtiny_linear-384"), replace(own, mechanism="nala"),
    ):  # fmt: skip
        assert run.same_model(ModelsResult({}, [other]), row) is None


@pytest.mark.parametrize("model", GROUP_MODELS)
def test_the_model_that_is_checked_has_all_kinds_of_blocks_and_is_heard(model):
    case = small(model)
    mechanism = case.mechanisms[1]
    kinds = []
    for depth in (None, case.checked_depth):
        host = create_host(case, mechanism, META, 0, depth=depth)
        stages = host.model.stages if TIMM_MODELS[f"linattn_{model}"].pyramid else [host.model]
        shifts = {module.shift for module in host.modules() if hasattr(module, "shift")}
        kinds.append([{repr(block) for block in stage.blocks} for stage in stages] + [shifts])
        blocks = len(host.blocks)
    assert kinds[0] == kinds[1]
    assert blocks < len(create_host(case, mechanism, META, 0).blocks)
    host = create_host(case, mechanism, CPU, 0, depth=case.checked_depth)
    look = look_at(host, mechanism, *draw_batch(case, CPU, 0), autocast=False)
    assert sum(look.explain.values()) >= look.linear == len(linear_parts(host)) > 0


def test_a_wrong_gradient_is_found_in_one_block_a_stage(monkeypatch):
    """Of the form that is timed alone; loss and output are as they should be."""
    monkeypatch.setattr(subject_module, "compile_host", lambda host, mode, backend: host)
    monkeypatch.setattr(subject_module, "profile_step", lambda step, device: None)
    case, row = small("nalaformer_xtiny"), ModelRow("nalaformer_xtiny-224", "nala", "compiled")
    subject = Subject(CONFIG, case, "nala", lambda what: None)
    subject.measure(row)
    assert (row.status, row.reason) == ("ok", "")
    assert row.checked_against == "fp64, nalaformer_xtiny, 2 images of 64 pixels, one block a stage"
    assert (row.explain_of, sum(row.explain.values()), row.calls) == ("one block a stage", 2, 4)
    whole = create_host(case, "nala", CPU, 0)
    assert row.parameters == sum(p.numel() for p in whole.parameters())
    right = LinearBase.linear

    def wrong(self, call, arguments):
        found = right(self, call, arguments)
        scaled = 1.05 * found.output - (0.05 * found.output).detach()
        return found._replace(output=scaled) if call.impl == "auto" else found

    monkeypatch.setattr(LinearBase, "linear", wrong)
    subject = Subject(CONFIG, case, "nala", lambda what: None)
    subject.measure(row)
    assert row.status == "WRONG"
    assert "gradient of model.stages" in row.reason
    subject._step(EAGER)
    assert not subject._verdict(EAGER).ok


def test_weights_are_those_of_the_seed_on_the_device_and_of_no_form():
    case = backbone_case("mirrorla_xtiny-224").quick()
    before = torch.get_rng_state()
    hosts = [create_host(case, "mirror", CPU, 0, impl=impl) for impl in ("auto", "auto", "chunked")]
    assert torch.equal(torch.get_rng_state(), before)
    first, *others = (host.state_dict() for host in hosts)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    changed = create_host(case, "mirror", CPU, 1).state_dict()
    assert any(not torch.equal(first[name], changed[name]) for name in first)


@pytest.mark.parametrize("model", GROUPS["presets"])
def test_constructors_put_all_on_the_device_and_read_nothing_from_it(model):
    """The meta device has no values: to read one there raises."""
    case = backbone_case(f"{model}-224")
    for mechanism in case.mechanisms:
        with META:
            host = HOSTS["backbone"](case, mechanism, "auto", case.checked_depth)
        assert {t.device for t in (*host.parameters(), *host.buffers())} == {META}


def test_what_is_compiled_beforehand_is_compiled_once():
    cases = {case.name: case for case in select(BOTH.cases)}
    hybrid, linear = cases.values()
    plan = [(case, m, mode) for case in (hybrid, linear) for m in ("softmax", "nala")
            for mode in ("compiled", "cuda-graph", "reduce-overhead", EAGER)]  # fmt: skip
    tasks = prepare_tasks(plan, ModelsResult({}))
    assert [(case.name, *rest) for case, *rest in tasks[:3]] == [
        (hybrid.name, "softmax", "compiled"), (hybrid.name, "nala", "compiled"), (linear.name, "nala", "compiled"),
    ]  # fmt: skip
    assert {mode for *_, mode in tasks[3:]} == {EAGER}
    counters.clear()
    check_one((linear.quick(), "nala", EAGER), CONFIG)
    assert graphs() == 0
    warm_one((linear.quick(), "nala", "compiled"), CONFIG)
    assert graphs() > 0
    torch.compiler.reset()


def sweep_result():
    meta = {"device": "a GPU", "precision": "bf16", "settings": {"quick": False}}
    result = ModelsResult(meta)
    for case in select(("presets-224", "presets-1024")):
        for mechanism, share in zip(case.mechanisms, (1.0, 0.5), strict=True):
            own = {"parameters": 5_440_000, "median_ms": 100 * share, "per_second": case.batch * 10 / share}
            own |= {"peak_bytes": int(share * 3 * 2**30), "unit": "images"}
            result.rows.append(ModelRow(case.name, mechanism, EAGER, **own))
    return result


def test_of_many_models_the_chart_shows_the_smallest():
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed: no chart")
    result = sweep_result()
    points = sweep_points(result, EAGER)
    shown = shown_points(points)
    assert len(points) == len(TIMM_MODELS)
    assert {name.partition(",")[0] for name in shown} == set(GROUP_MODELS)
    few = dict(list(points.items())[:MOST_LINES])
    assert shown_points(few) == few
    figure = sweep_figure(result, EAGER)
    assert len(figure.legends[0].get_texts()) == len(GROUP_MODELS)
    assert f"the smallest of {len(TIMM_MODELS)} models" in figure.get_suptitle()


def test_the_table_of_backbones():
    result = sweep_result()
    result.find("rala_tiny-1024", "rala", EAGER).status = "out of memory"
    result.find("qtvit_1-1024", "quadratic", EAGER).parameters = 7_000_000  # positions of a larger plane
    twin = result.find("qtvit_1-1024", "softmax", EAGER)
    twin.status, twin.median_ms, twin.peak_bytes = "out of memory", None, None
    result.rows.append(ModelRow("vit-224", "relu", EAGER, median_ms=1.0, per_second=1.0, unit="images"))
    result.rows.append(ModelRow("rala_tiny-512", "rala", "compiled", median_ms=1.0, per_second=1.0, unit="images"))
    lines = backbones_table(result, EAGER).splitlines()
    assert lines[:2] == ["| model | mechanism | parameters | 224 | 1024 |", "|---|---|---:|---:|---:|"]
    assert len(lines) == 2 + len(TIMM_MODELS)
    good = "1,280/s (2.00x), 1.5 GiB (0.50x)"
    assert f"| `nalaformer_tiny` | `nala` | 5.4 M | {good} | 80/s (2.00x), 1.5 GiB (0.50x) |" in lines
    assert f"| `rala_tiny` | `rala` | 5.4 M | {good} | out of memory |" in lines
    assert f"| `qtvit_1` | `quadratic` | 5.4 M | {good} | 80/s, 1.5 GiB; softmax: out of memory |" in lines
