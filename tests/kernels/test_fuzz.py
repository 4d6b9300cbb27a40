"""tools/fuzz_gpu.py: random calls pass, a wrong operator is told, and a process that dies costs one case."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.device import DEVICE
from linattn.kernels import linear

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))

import fuzz_calls  # noqa: E402
from fuzz_cases import ALIKE, DECAYS, KINDS, WIDTHS, case_of, name_of  # noqa: E402
from fuzz_gpu import main  # noqa: E402

HERE = ["--device", DEVICE, "--workers", "0"]
STUB = """
import os

def need(device):
    pass

def check(case, device):
    number = int(case.name.rpartition("-")[2])
    if number == 1:
        os._exit(7)
    if number == 3:
        raise RuntimeError("an illegal memory access was encountered")
    return ["output: error 1, allowed 0"] if number == 4 else []

def refusal(problem):
    return None

def lost_gpu():
    return True
"""


@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_pass(kind: str, capsys: pytest.CaptureFixture) -> None:
    status = main([*HERE, "--only", kind, "--seed", "1", "--count", "1"])
    said = capsys.readouterr().out
    assert (status, "1 passed, 0 failed, 0 refused" in said) == (0, True), said


def test_a_wrong_gradient_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Half of its size too small."""
    for name in ("linear_attention", "linear_attention_with_state"):
        right = getattr(fuzz_calls, name)

        def wrong(q: Any, *inputs: Any, right: Any = right, **options: Any) -> Any:
            return right((q + q.detach()) / 2 if options["impl"] == "triton" else q, *inputs, **options)

        monkeypatch.setattr(fuzz_calls, name, wrong)
    assert main(["--device", DEVICE, "--case", "causal-1-0-0", "--case", "convolution-1-0-0"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAILED causal-1-0-0 dtype=.*\n    d q: error [\d.e+-]+, allowed [\d.e+-]+", said)
    assert "1 passed, 1 failed, 0 refused" in said


def test_a_number_that_is_not_finite_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    right = fuzz_calls.evaluate

    def wrong(*given: Any) -> Any:
        found = right(*given)
        if given[-1] == "triton":
            found["d v"][0, 0, 0, 0] = float("nan")
        return found

    monkeypatch.setattr(fuzz_calls, "evaluate", wrong)
    assert main(["--device", DEVICE, "--case", "causal-1-0-0"]) == 1
    assert re.search(r"d v has 1 of \d+ numbers not finite", capsys.readouterr().out)


def test_what_kernels_refuse_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(linear, "against", lambda call: "they are tired")
    assert main(["--device", DEVICE, "--case", "causal-1-0-0", "--case", "convolution-1-0-0"]) == 0
    said = capsys.readouterr().out
    assert "1 passed, 0 failed, 1 refused" in said
    assert "refused 1 times: they are tired" in said


def test_a_process_that_dies_or_loses_its_gpu_costs_one_case(tmp_path: Path) -> None:
    for name in ("fuzz_gpu.py", "fuzz_cases.py", "waiting.py"):
        shutil.copy(TOOLS / name, tmp_path)
    (tmp_path / "fuzz_calls.py").write_text(STUB)
    command = [sys.executable, str(tmp_path / "fuzz_gpu.py"), "--workers=1", "--count=6", "--only=lion"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "3 passed, 3 failed, 0 refused" in done.stdout
    for number, why in ((1, "it ended with status 7"), (3, "it lost the GPU"), (4, "output: error 1, allowed 0")):
        assert len(re.findall(rf"FAILED lion-0-0-{number} .*\n    {why}", done.stdout)) == 2  # at once, and at the end


def test_cases_are_drawn_from_their_names() -> None:
    """All widths and decays come, no more features than kernels take, and neighbours share what is compiled."""
    cases = [case_of(name_of(list(KINDS), 0, 0, number)) for number in range(3000)]
    assert cases[:9] == [case_of(case.name) for case in cases[:9]]
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.K for case in cases} == {case.V for case in cases} == set(WIDTHS)
    assert max(case.features for case in cases) == 256
    assert all(case.decay in DECAYS.get(case.kind, [None]) for case in cases)
    for first in range(0, 3000, ALIKE):
        shared = {
            (c.kind, c.dtype, c.K, c.V, c.H, c.map, c.norm, c.decay, c.final) for c in cases[first : first + ALIKE]
        }
        assert len(shared) == 1
    assert len({case.T for case in cases}) > 500
