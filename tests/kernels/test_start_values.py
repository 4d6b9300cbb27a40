"""Compiled for Hopper without one: what a product of scores starts from."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linattn import exponential_attention

pytest.importorskip("triton.compiler")
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", ["causal", "exponential"])
def test_scores_start_from_zero(kind: str) -> None:
    """Not from the row sums' gradients, which the walk of dq reads again after the product.

    Started from them, scores that the causal mask drops for good shared a register with one of them: the assembler did
    not mind that a product writes all its results. dq was wrong by half of its size.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    made = subprocess.run([sys.executable, __file__, kind], env=environment, capture_output=True, text=True, check=True)
    zeros = re.findall(r"(%\w+) = arith.constant dense<0.000000e\+00> : tensor<64x64xf32", made.stdout)
    starts = re.findall(r"ttng.warp_group_dot %\w+, %\w+, (%\w+)", made.stdout)
    assert len(starts) > 2  # the scores come first; what is added to later ones is theirs alone
    assert starts[0] in zeros


def _print_compiled(kind: str) -> None:
    """Of the walk that makes dq."""
    from kernels.causal_case import Case
    from kernels.hopper import compile_launch, record_launches

    launches = record_launches()
    if kind == "causal":
        Case(T=130, K=80, V=16, dtype=torch.bfloat16, norm="sum", state=True).kernels()
        walk = next(launch for launch in launches if launch.constants.get("EXTRA") == 1)
    else:
        q, gate = torch.zeros(1, 1, 70, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, 1, 70)
        out = exponential_attention(q, q, q, log_decay=gate, log_input=gate, impl="triton")
        out.sum().backward()
        walk = next(launch for launch in launches if launch.constants.get("ROLE") == 1)
    print(compile_launch(walk)["ttgir"])


if __name__ == "__main__":
    _print_compiled(sys.argv[1])
