"""tools/test_gpu.py: tests in several processes, of which some die, one loses its GPU, and the time may be up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("n", range(9))
def test_many(n):
    if os.environ.get("SLEEP"):
        time.sleep(float(os.environ["SLEEP"]))

@pytest.mark.parametrize("n", range(3))
def test_loses_the_gpu(n):
    if n == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.parametrize("n", range(3))
def test_dies(n):
    if n == 1:
        os._exit(3)

def test_fails():
    assert 1 == 2

@pytest.mark.skip(reason="on purpose")
def test_is_skipped():
    pass
"""


def run_tool(folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    (folder / "test_them.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "tools/test_gpu.py", *options, "-m", "not gpu", f"--rootdir={folder}"]
    command += ["-c", str(folder / "pytest.ini"), str(folder / "test_them.py")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_bad_test_costs_one_failure_and_every_other_runs(tmp_path: Path) -> None:
    status, text = run_tool(tmp_path, WORKERS="2")
    assert status == 1
    assert "13 passed, 3 failed, 1 skipped, 0 not run" in text
    assert "lost its GPU in test_them.py::test_loses_the_gpu[1] and starts anew" in text
    assert "it ended its process (status 3)" in text
    for name in ("test_loses_the_gpu[1]", "test_dies[1]", "test_fails"):
        assert text.count(f"FAILED test_them.py::{name}") == 2  # when it happened, and at the end


@pytest.mark.slow
def test_when_the_time_is_up_what_was_left_is_counted(tmp_path: Path) -> None:
    status, text = run_tool(tmp_path, "--seconds", "0.001", WORKERS="1", SLEEP="0.1")
    assert status == 1
    assert "0 passed, 0 failed, 0 skipped, 17 not run" in text


@pytest.mark.slow
def test_what_passed_is_not_run_again(tmp_path: Path) -> None:
    record = tmp_path / "passed"
    run_tool(tmp_path, "--record", str(record), WORKERS="2")
    assert len(set(record.read_text().splitlines())) == 13
    status, text = run_tool(tmp_path, "--record", str(record), WORKERS="1")
    assert status == 1
    assert "4 tests in 1 processes, 13 passed before" in text
    assert "0 passed, 3 failed, 1 skipped, 0 not run, 13 passed before" in text
