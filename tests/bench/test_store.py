import json

import pytest

from linattn.bench import store
from linattn.bench.rows import Result, Row
from linattn.bench.settings import BenchConfig
from linattn.bench.store import describe_run, save_result, write_atomically


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, lambda temporary: temporary.write_text("old"))

    def crash_halfway(temporary):
        temporary.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, crash_halfway)
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_crash_before_the_replacement_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "a.json"
    write_atomically(path, lambda temporary: temporary.write_text("old"))

    def fail(*_):
        raise error

    monkeypatch.setattr(store.os, "replace", fail)
    with pytest.raises(error):
        write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["a.json"]


def test_folders_are_made_and_others_may_read(tmp_path):
    path = tmp_path / "deep" / "er" / "a.json"
    write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o044 == 0o044


def test_json_says_how_it_was_measured_and_has_no_nan(tmp_path):
    config = BenchConfig(seed=7)
    result = Result(describe_run(config, ["linattn", "bench", "--seed", "7"]))
    result.add(Row("sdpa", 64, "forward", "ok", median_ms=2.0, error=float("nan")))
    result.add(Row("chunked", 64, "forward", "ok", median_ms=0.5))
    result.add(Row("reference", 64, "forward", "left out", "too long"))
    path = tmp_path / "r.json"
    save_result(result, path)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert set(data) == {"meta", "rows", "growth"}
    assert data["meta"].keys() >= {"device", "cpu", "threads", "versions", "command", "date", "seed", "settings"}
    assert data["meta"]["command"] == "linattn bench --seed 7"
    assert data["meta"]["seed"] == 7
    assert data["meta"]["versions"].keys() == {"linattn", "torch", "python"}
    rows = {row["contender"]: row for row in data["rows"]}
    assert rows["chunked"]["speedup_over_sdpa"] == 4
    assert rows["sdpa"]["speedup_over_chunked"] == 0.25
    assert rows["reference"]["reason"] == "too long"
    assert rows["reference"]["median_ms"] is None
