"""What calls launch compiles for Hopper, without one: the interpreter takes products of unlike operands, a GPU not."""

import os
import re
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


@pytest.mark.parametrize("kind", ["causal", "exponential"])
def test_scores_start_from_zero(kind: str) -> None:
    """Not from the row sums' gradients, which the walk of dq reads again after the product.

    Started from them, scores that the causal mask drops for good shared a register with one of them: the assembler did
    not mind that a product writes all its results. dq was wrong by half of its size.
    """
    made = _run(__file__, kind)
    zeros = re.findall(r"(%\w+) = arith.constant dense<0.000000e\+00> : tensor<64x64xf32", made.stdout)
    starts = re.findall(r"ttng.warp_group_dot %\w+, %\w+, (%\w+)", made.stdout)
    assert len(starts) > 2, made.stderr  # the scores come first; what is added to later ones is theirs alone
    assert starts[0] in zeros


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


def _print_compiled(what: str) -> None:
    import torch

    from kernels.hopper import compile_launch, record_launches
    from linattn import exponential_attention, linear_attention

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    launches = record_launches()
    if what == "causal":  # the walk that makes dq
        q, v = leaf(1, 2, 130, 80), leaf(1, 1, 130, 16)
        linear_attention(q, q[:, :1], v, causal=True, impl="triton").sum().backward()
        print(compile_launch(next(one for one in launches if one.constants.get("EXTRA") == 1))["ttgir"])
    elif what == "exponential":
        q, gate = leaf(1, 1, 70, 64), torch.zeros(1, 1, 70)
        exponential_attention(q, q, q, log_decay=gate, log_input=gate, impl="triton").sum().backward()
        print(compile_launch(next(one for one in launches if one.constants.get("ROLE") == 1))["ttgir"])
    else:
        q, v = (leaf(1, 1, 600, width, dtype=getattr(torch, what)) for width in (192, 96))
        linear_attention(q, q, v, norm_features=(q, q), impl="triton").sum().backward()
        for launch in {launch.name: launch for launch in launches}.values():
            print(launch.name, flush=True)
            compile_launch(launch)


if __name__ == "__main__":
    _print_compiled(sys.argv[1])
