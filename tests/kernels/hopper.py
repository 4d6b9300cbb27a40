"""Kernels compiled for Hopper without one: what calls launch is recorded and does not run.

Only in a process whose Triton does not interpret, and that has nothing else to do: all of the library's launches are
taken over.
"""

import sys
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, NamedTuple

import torch

PROCESSORS = 132
NAMES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


class Launch(NamedTuple):
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        """What tells its compiled code from others', but for which numbers are divisible by 16."""
        kinds = [str(x.dtype) for x in self.arguments if isinstance(x, torch.Tensor)]
        return f"{self.kernel.fn.__name__} {self.constants} of {', '.join(dict.fromkeys(kinds))}"


def record_launches() -> list[Launch]:
    """From now on launches on CPU tensors come into this list."""
    import linattn.kernels as kernels
    from linattn.kernels.common import launching, support

    launches: list[Launch] = []
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    real = launching.launch

    def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        launches.append(Launch(kernel, arguments, constants))

    for module in [module for name, module in sys.modules.items() if name.startswith("linattn.")]:
        for name in [name for name, value in vars(module).items() if value is real]:
            setattr(module, name, launch)
        if hasattr(module, "multiprocessors"):
            module.multiprocessors = lambda device: PROCESSORS
    support._reason_against_device = lambda device: ""
    return launches


def compile_launch(launch: Launch) -> dict[str, Any]:
    """The stages of the compiled code by name; raises what the compiler raises."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, given, constants = launch.kernel, launch.arguments, dict(launch.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    signature, known, divisible = {}, {}, {}
    for n, name in enumerate(kernel.arg_names):
        x = given[n] if n < len(given) else constants.get(name, kernel.params[n].default)
        number = n < len(given) and type(x) is int and not kernel.params[n].do_not_specialize
        if n >= len(given) or x is None or (number and x == 1):
            signature[name], known[n,] = "constexpr", x
            continue
        signature[name] = NAMES[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if type(x) is float else "i32"
        if isinstance(x, torch.Tensor) or (number and x % 16 == 0):
            divisible[n,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=divisible)
    return compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm
