"""What calls launch compiles for Hopper, without one: the interpreter takes products of unlike operands, a GPU not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.compiler")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_random_calls_compile() -> None:
    """Those of one seed; ``tools/fuzz_compile.py`` draws more."""
    made = _run(str(ROOT / "tools/fuzz_compile.py"), "--seed", "1", "--count", "10")
    assert made.stdout.endswith(" 0 failed\n"), made.stdout + made.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_wide_heads_with_a_denominator_of_their_own_compile(dtype: str) -> None:
    """Their numerator's gradient is fp32 whatever the inputs are."""
    made = _run(__file__, dtype)
    assert "bidirectional_gather" in made.stdout, made.stderr
    assert made.returncode == 0, made.stderr


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


def _compile_wide_heads(dtype: str) -> None:
    import torch

    from kernels.hopper import compile_launch, record_launches
    from linattn import linear_attention

    launches = record_launches()
    q, v = (torch.zeros(1, 1, 600, width, dtype=getattr(torch, dtype), requires_grad=True) for width in (192, 96))
    linear_attention(q, q, v, norm_features=(q, q), impl="triton").sum().backward()
    for launch in {launch.name: launch for launch in launches}.values():
        print(launch.name, flush=True)
        compile_launch(launch)


if __name__ == "__main__":
    _compile_wide_heads(sys.argv[1])
