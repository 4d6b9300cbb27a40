"""The page on sequence models says what the result files say, and where there are none."""

import json
from dataclasses import asdict

import pytest
from linattn.lab.bench.decoding.rows import DecodingResult, DecodingRow
from linattn.lab.bench.language.sizes import FULL
from linattn.lab.bench.throughput.rows import ThroughputResult, ThroughputRow
from tests.test_readme import tool

META = {
    "device": "GPU", "versions": {"torch": "2"}, "date": "2026-01-01T", "command": "linattn ...", "finished": True,
    "model": asdict(FULL), "settings": {"dtype": "bfloat16", "tokens": 32768}, "runs": [{}],
}  # fmt: skip
PARTS = ("mqar", "enwik8", "listops", "imdb", "decoding", "throughput")


@pytest.mark.parametrize("part", PARTS)
def test_its_parts_are_current(part):
    page = tool.SEQUENCES.read_text()
    new = tool.fill(page, {part: tool.sequence_parts()[part]})
    assert new == page, f"the part {part!r} of docs/sequences.md is stale: run `make readme` and commit the change"


def test_what_is_not_measured_is_said(tmp_path):
    parts = tool.sequence_parts(tmp_path)
    assert set(parts) == set(PARTS)
    assert parts["mqar"] == "Not measured yet: `linattn compare --task mqar-mix` has not been run.\n"
    assert all(text.startswith("Not measured yet: `linattn ") for text in parts.values())


def comparison(scores):
    """Results by (mechanism, Canon layers, width); each with a rate of its own."""
    metric = {"field": "score", "name": "accuracy", "unit": "%", "decimals": 2, "higher": True}
    host = {"tokens": 128, "width": [64, 128], "depth": 2, "equal_parameters": False}
    meta = META | {
        "kind": "text", "metric": metric, "data": {"name": "mqar"}, "host": host, "seeds": [0],
        "train": {"steps": 2000, "batch_size": 256}, "lrs": [0.001, 0.003, 0.01],
    }  # fmt: skip
    entries, rows = [], []
    for number, ((pattern, canon, width), score) in enumerate(scores.items()):
        name = f"{pattern}{'' if canon is None else f'+{canon}'} {width}"
        entries.append({
            "mechanism": name, "pattern": pattern, "canon": canon, "width": width, "series": name.split()[0],
            "score_mean": score, "score_std": None, "score_min": score, "score_max": score,
            "lr": (0.001, 0.003, 0.01)[number % 3], "lr_edge": ("lowest", None, "highest")[number % 3],
            "parameters": 70_000 + number, "state_bytes": 1024 * (number + 1),
            "tokens_per_second_train": 1.5e6 * (number + 1), "train_seconds_mean": 12.4,
        })  # fmt: skip
        done = {"status": "waiting"}
        if score is not None:
            metrics = {"loss": 1.0, "accuracy": score, "accuracy_64x4": score + 0.04, "accuracy_128x32": score / 2}
            done = {"status": "done", "score": score, "graphs": "replayed", "epochs": [{"metrics": metrics}]}
        rows.append({"mechanism": name, "seed": 0, **done})
    return {"meta": meta, "mechanisms": entries, "rows": rows}


def write(folder, name, value):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(value))
    return folder / f"{name}.json"


def test_canon_stands_beside_none_for_every_width(tmp_path):
    found = comparison({
        ("softmax", None, 64): 99.0, ("softmax", "ABCD", 64): 100.0, ("gated", None, 64): 12.345,
        ("gated", "ABCD", 64): 80.0, ("gated", None, 128): 20.0, ("gated", "ABCD", 128): None,
    })  # fmt: skip
    found["rows"][2]["graphs"] = "stopped: the step cannot be recorded"
    path = write(tmp_path / "gpu", "compare-mqar", found)
    text = tool.sequence_parts(tmp_path)["mqar"]
    head = "| mechanism | width | Accuracy, %: no Canon | Accuracy, %: Canon ABCD | learning rate | parameters | "
    assert head + "state, KiB | million tokens/s, training | seconds a run |" in text
    cells = "0.001 ↓ / 0.003 | 70,000 / 70,001 | 1.00 / 2.00 | 1.50 / 3.00 | 12 |"
    assert f"| `softmax` | 64 | 99.00 | 100.00 | {cells}" in text
    assert "| `gated` | 64 | 12.35 | 80.00 | 0.01 ↑ / 0.001 ↓ |" in text
    assert "| `gated` | 128 | 20.00 |  |" in text
    assert "a better one may lie beyond." in text
    assert "accuracy in %: no Canon / Canon ABCD." in text
    assert "| mechanism | width | 64 tokens, 4 pairs | 128 tokens, 32 pairs |" in text
    assert "| `softmax` | 64 | 99.0 / 100.0 | 49.5 / 50.0 |" in text
    assert "| `gated` | 128 | 20.0 /  | 10.0 /  |" in text
    assert "not as CUDA graphs: gated 64 (the step cannot be recorded)." in text
    assert ".png" not in text
    assert tool.draw_charts(tmp_path) == [path.with_suffix(".png")]
    assert "](../gpu/compare-mqar.png)" in tool.sequence_parts(tmp_path)["mqar"].replace(f"{tmp_path.name}/", "")


def test_decoding_has_a_table_for_every_batch(tmp_path):
    result = DecodingResult(dict(META))
    times = {"softmax": (1.0, 8.0), "gated": (2.0, 2.0)}
    for name, found in times.items():
        for context, ms in zip((1024, 131072), found, strict=True):
            state = 2**20 * (context // 1024 if name == "softmax" else 3)
            numbers = {
                "median_ms": ms,
                "state_bytes": state,
                "weight_bytes": 1,
                "peak_bytes": 1,
                "error": 1.0,
                "budget": 4.0,
            }
            result.put(DecodingRow(name, context=context, batch=1, mode="cuda-graph", **numbers))
    result.put(DecodingRow("softmax", "out of memory", context=131072, batch=16, mode="cuda-graph"))
    result.put(DecodingRow("gated", "left out", context=131072, batch=16, mode="cuda-graph"))
    write(tmp_path / "gpu", "decoding", result.as_json())
    text = tool.sequence_parts(tmp_path)["decoding"]
    assert "| context | `softmax` | `gated` |" in text
    assert "| 1,024 | 1.00 (1.00) | 2.00 (3.00) |" in text
    assert "| 131,072 | 8.00 (128) | 2.00 (3.00) |" in text
    assert (
        "Batch 16, cuda-graph:\n\n| context | `softmax` | `gated` |\n|---:|---:|---:|\n| 131,072 | out of memory |"
        in text
    )
    assert "`gated` batch 1, from" in text
    assert "(4x at 131,072)" in text
    assert "4 rows were checked in the same run and used at most 25% of their error budget. 1 rows are not" in text


def test_throughput_is_held_against_softmax(tmp_path):
    result = ThroughputResult(dict(META))
    for name, speeds in {"softmax": (200_000, 50_000), "elu": (150_000, 150_000)}.items():
        for length, speed in zip((2048, 32768), speeds, strict=True):
            ms = 1000 * 32768 / speed
            result.put(ThroughputRow(name, median_ms=ms, tokens_per_second=speed, length=length, error=1.0, budget=2.0))
    result.put(ThroughputRow("gated", "failed", "it broke", length=2048))
    write(tmp_path / "gpu", "throughput", result.as_json())
    text = tool.sequence_parts(tmp_path)["throughput"]
    assert "| 2,048 | 200 | 150 (0.75x) | failed |" in text
    assert "| 32,768 | 50.0 | 150 (3.00x) |  |" in text
    assert "Faster than softmax: `elu` from" in text
    assert "Wrong or failed: gated (failed: it broke)." in text
