import json

from linattn.lab.bench.rows import Result, Row
from linattn.lab.bench.settings import BenchConfig
from linattn.lab.bench.store import describe_run, save_result


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
