"""The README says what is: its tables are current, its example runs, its commands exist."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import typer.main
from linattn.lab.bench.rows import Result, Row
from linattn.lab.bench.settings import BenchConfig
from linattn.lab.bench.store import describe_run, save_result

from linattn.lab.cli.main import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.S | re.M)


def load_tool():
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "tools" / "update_readme.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


tool = load_tool()


def code_of(text: str) -> list[str]:
    """What stands in code blocks and between backticks."""
    return [block or span for block, span in CODE.findall(text)]


PAGES = {
    "README.md": (tool.README, tool.generated_parts),
    "docs/speed.md": (tool.SPEED, tool.speed_parts),
    "docs/backbones.md": (tool.BACKBONES, tool.backbone_parts),
}


@pytest.mark.parametrize("name", PAGES)
def test_generated_parts_are_current(name):
    path, parts = PAGES[name]
    page = path.read_text()
    for part, text in parts().items():
        stale = f"the part {part!r} of {name} is stale: run `make readme` and commit the change"
        assert tool.fill(page, {part: text}) == page, stale


def test_the_selection_is_of_measured_cases():
    """A case that was renamed would be left out in silence."""
    path = tool.RESULTS / "h200" / "kernels.json"
    text, cases = tool.selection_text(path), {row["case"] for row in json.loads(path.read_text())["rows"]}
    shown = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert len(shown) == 12
    assert set(shown) <= cases
    row = next(line for line in tool.kernels_text(path).splitlines() if line.startswith("| `lion-16384`"))
    assert [cell.strip() for cell in row.split("|")[7:9]] == [
        cell.strip() for line in text.splitlines() if "lion-16384" in line for cell in line.split("|")[3:5]
    ]


def test_a_conversion_shows_what_it_cost():
    """Accuracy before, right after and at the end, and how long each was trained."""
    path = tool.RESULTS / "h200" / "backbones-cifar10-conversion.json"
    text, result = tool.comparison_text(path), json.loads(path.read_text())
    relu = next(row for row in result["mechanisms"] if row["mechanism"] == "relu")
    fields = ("top1_before", "top1_converted", "top1")
    cells = [f"{relu[f'{field}_mean']:.2f} ± {relu[f'{field}_std']:.2f}" for field in fields]
    assert f"| `relu` | {' | '.join(cells)} |" in text
    assert "30 epochs on softmax, converted, 3 more" in text


def test_the_example_runs():
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})


def test_make_targets_exist():
    named = {name for code in code_of(README) for name in re.findall(r"\bmake ([a-z-]+)", code)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test"} <= named
    assert not named - targets, f"README.md names targets that the Makefile lacks: {sorted(named - targets)}"


def test_commands_exist():
    named = {name for code in code_of(README) for name in re.findall(r"^linattn ([a-z]+)", code, re.M)}
    commands = set(typer.main.get_command(app).commands)
    assert named
    assert not named - commands, f"README.md names commands that linattn lacks: {sorted(named - commands)}"


def test_linked_files_exist():
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert linked
    assert all((ROOT / link).exists() for link in linked)


def test_results_become_tables(tmp_path):
    config = BenchConfig(lengths=(1024, 2048))
    result = Result(describe_run(config, ["linattn", "bench"]))
    times = {("sdpa", 1024): 10.0, ("chunked", 1024): 5.0, ("sdpa", 2048): 40.0, ("chunked", 2048): 1234.5}
    for (name, length), ms in times.items():
        result.add(Row(name, length, "forward", "ok", median_ms=ms, peak_bytes=2**21, error=1e-7, budget=4e-7))
    result.add(Row("reference", 2048, "forward", "left out", "would need too much"))
    folder = tmp_path / "results" / "cpu"
    save_result(result, folder / "attention-causal.json")
    (folder / "attention-causal.png").write_bytes(b"")
    text = tool.speed_parts(tmp_path / "results")["attention"]
    assert "| forward, T | sdpa | chunked | reference |" in text
    assert "| 1024 | 10.0 ms, 2.00 MiB | 5.00 ms, 2.00 MiB |  |" in text
    assert "| 2048 | 40.0 ms, 2.00 MiB | 1,234 ms, 2.00 MiB | left out |" in text
    assert "T^2.00" in text
    assert "4 rows were checked in the same run and used at most 25% of their error budget" in text
    assert "](../results/cpu/attention-causal.png)" in text
    assert json.loads((folder / "attention-causal.json").read_text())["rows"][0] == asdict(result.rows[0])


def test_a_wrong_kernel_is_told_with_its_reason():
    results = json.loads((ROOT / "results/h200/kernels.json").read_text())
    noted = {row["note"] for row in results["rows"] if row["status"] == "WRONG"}
    assert all(f"({note})" in (ROOT / "docs/speed.md").read_text() for note in noted)


def test_no_results_is_said(tmp_path):
    parts = tool.generated_parts(tmp_path) | tool.speed_parts(tmp_path)
    commands = {
        "comparison": "compare",
        "speed": "kernels",
        "kernels": "kernels",
        "memory": "memory",
        "models": "models",
        "attention": "bench",
    }
    for part, command in commands.items():
        assert parts[part] == f"No results of `linattn {command}` are recorded yet.\n"


def test_a_comparison_becomes_a_table(tmp_path):
    runs = {"relu": (90.0, 91.0), "softmax": (93.0, 93.5)}
    meta = {
        "host": {"tokens": 196, "width": 192, "depth": 4},
        "data": {"name": "clothes", "train": 60000, "test": 10000},
    }
    meta |= {
        "train": {"epochs": 16},
        "seeds": [0, 1],
        "device": "GPU",
        "versions": {"torch": "2"},
        "date": "2026-01-01T",
    }
    costs = {
        "parameters": 1234,
        "images_per_second_forward": 2000.4,
        "images_per_second_train": 1000,
        "entropy_gap": 0.5,
    }
    entries = [
        {"mechanism": name, "top1_mean": sum(top1) / 2, "top1_std": 0.7, "top1_min": top1[0], "top1_max": top1[1],
         "peak_bytes_train": 2**21, **costs}
        for name, top1 in runs.items()
    ]  # fmt: skip
    rows = [{"mechanism": name, "status": "done", "top1": x} for name, top1 in runs.items() for x in top1]
    result = {"meta": meta | {"command": "linattn compare", "finished": True}, "mechanisms": entries, "rows": rows}
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "compare-clothes.json").write_text(json.dumps(result))
    text = tool.generated_parts(tmp_path)["comparison"]
    assert "| `relu` | 90.50 ± 0.70 | 90.00 to 91.00 | 1,234 | 2,000 | 1,000 | 2 MiB | +0.50 |" in text
    assert "60,000 training and 10,000 test images, 196 tokens, width 192, depth 4, 16 epochs, 2 seeds." in text
    assert "every run is above those of relu" in text


def test_a_comparison_on_sequences_becomes_a_table(tmp_path):
    """Bits per byte, where less is better, with rates that were chosen; one mechanism has no result yet."""
    metric = {"field": "score", "name": "bits per byte", "unit": "", "decimals": 4, "higher": False}
    meta = {
        "kind": "text", "metric": metric, "data": {"name": "text", "data": "some/where/enwik8.gz"},
        "host": {"tokens": 1024, "width": [256, 384], "depth": 8, "equal_parameters": True},
        "train": {"steps": 2000, "batch_size": 32}, "seeds": [0, 1], "lrs": [0.001, 0.003], "device": "GPU",
        "versions": {"torch": "2"}, "date": "2026-01-01T", "command": "linattn compare --task text", "finished": True,
    }  # fmt: skip
    runs = {"gated+AbCD": (1.5, 1.6), "softmax": (1.25, 1.75), "elu": ()}
    entries = [
        {"mechanism": name, "score_mean": sum(found) / 2 if found else None, "score_std": 0.05 if found else None,
         "score_min": min(found, default=None), "score_max": max(found, default=None), "lr": 0.003,
         "parameters": 10_500_000, "state_bytes": 1536, "tokens_per_second_train": 2e6, "peak_bytes_train": 2**21}
        for name, found in runs.items()
    ]  # fmt: skip
    rows = [{"mechanism": name, "status": "done", "score": x} for name, found in runs.items() for x in found]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "compare-enwik8.json").write_text(
        json.dumps({"meta": meta, "mechanisms": entries, "rows": rows})
    )
    assert tool.generated_parts(tmp_path)["comparison"] == "No results of `linattn compare` are recorded yet.\n"
    text = tool.comparison_text(tmp_path / "gpu" / "compare-enwik8.json")
    assert text.startswith("**text, enwik8.gz**, 1,024 tokens a sequence, width 256, 384, depth 8, equal parameters, ")
    assert "2,000 steps of 32 sequences, 2 seeds, learning rate of each the best of 0.001, 0.003 on held-out" in text
    columns = "| mechanism | bits per byte, mean ± std | least to greatest | learning rate | parameters | state | "
    assert columns + "tokens/s training | peak memory |" in text
    cells = "1.5500 ± 0.0500 | 1.5000 to 1.6000 | 0.003 | 10,500,000 | 1.5 KiB | 2,000,000 | 2 MiB |"
    assert f"| `gated+AbCD` | {cells}" in text
    assert "| `elu` |  |  | 0.003 |" in text
    assert "The mean bits per byte of gated+AbCD is 1.5500 (1.5000 to 1.6000 over 2 seeds)" in text
    assert "top-1" not in text
    assert "images" not in text


def test_a_comparison_that_still_chooses_its_rates_shows_what_it_chooses_by(tmp_path):
    """In brackets, and only where no run that is tested is done."""
    metric = {"field": "score", "name": "accuracy", "unit": "%", "decimals": 2, "higher": True}
    meta = {
        "kind": "text", "metric": metric, "data": {"name": "mqar-mix"},
        "host": {"tokens": 128, "width": [64], "depth": 2, "equal_parameters": False},
        "train": {"steps": 10, "batch_size": 4}, "seeds": [0], "lrs": [0.001, 0.003], "device": "GPU",
        "versions": {"torch": "2"}, "date": "2026-01-01T", "command": "linattn compare", "finished": False,
    }  # fmt: skip
    scores = {"elu": (7.0, 8.25), "zeros": (76.5, None), "gated": (None, None)}
    entries = [
        {"mechanism": name, "pattern": name, "canon": None, "width": 64, "lr": None, "score_mean": None,
         "sweep": [{"lr": lr, "score": x} for lr, x in zip(meta["lrs"], found, strict=True)]}
        for name, found in scores.items()
    ]  # fmt: skip
    waiting = [{"mechanism": name, "status": "waiting", "score": None, "epochs": None} for name in scores]
    path = tmp_path / "compare-mqar.json"

    def written(entries, rows):
        path.write_text(json.dumps({"meta": meta, "mechanisms": entries, "rows": rows}))
        return tool.canon_text(path)

    text = written(entries, waiting)
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| `")] == [
        "(8.25)",
        "(76.50)",
        "",
    ]
    assert "In brackets: of runs that choose a learning rate" in text
    assert "3 of 6 runs that choose are done." in text
    assert "No linear mechanism has a result yet" not in text, "nothing is ranked by what rates are chosen by"
    tested = [entry | {"score_mean": 50.0, "score_std": None} for entry in entries]
    text = written(tested, [row | {"status": "done", "score": 50.0} for row in waiting])
    assert "| 50.00 |" in text
    assert "brackets" not in text


def test_a_stale_or_missing_part_is_caught():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert tool.fill(text, {"x": "new\n"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="'y' once"):
        tool.fill(text, {"y": "new\n"})
