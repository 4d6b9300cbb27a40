"""Compiled for Hopper without one: what a product of scores starts from."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.compiler")
TESTS = Path(__file__).parents[2]


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


def _launched(kind: str) -> tuple:
    """Kernel, arguments and constants of the walk that makes dq; nothing runs."""
    from linattn.ops.triton.causal import passes as causal_passes
    from linattn.ops.triton.causal import token_gradients
    from linattn.ops.triton.exponential import passes as exponential_passes
    from linattn.ops.triton.exponential.library import exponential_directly
    from ops.triton.causal_case import Case

    seen = []
    for module in (causal_passes, token_gradients, exponential_passes):
        module.launch = lambda kernel, programs, *args, **constants: seen.append((kernel, args, constants))
    if kind == "causal":
        Case(T=130, K=80, V=16, dtype=torch.bfloat16, norm="sum", state=True).kernels()
        return next(launched for launched in seen if launched[2].get("EXTRA") == 1)
    q, gate = torch.zeros(1, 1, 70, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, 1, 70)
    out, *_ = exponential_directly(q, q, q, gate, gate, None, None, None, None, 1.0, q.dtype, False)
    out.sum().backward()
    return next(launched for launched in seen if launched[2].get("ROLE") == 1)


def _print_compiled(kind: str) -> None:
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, args, constants = _launched(kind)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
    signature, known, divisible = {}, {}, {}
    for n, name in enumerate(kernel.arg_names):
        x = args[n] if n < len(args) else constants.get(name, kernel.params[n].default)
        one = n < len(args) and type(x) is int and x == 1 and not kernel.params[n].do_not_specialize
        if n >= len(args) or x is None or one:
            signature[name], known[n,] = "constexpr", x
            continue
        signature[name] = names[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if type(x) is float else "i32"
        if isinstance(x, torch.Tensor) or (type(x) is int and x % 16 == 0 and not kernel.params[n].do_not_specialize):
            divisible[n,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=divisible)
    print(compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"])


if __name__ == "__main__":
    _print_compiled(sys.argv[1])
