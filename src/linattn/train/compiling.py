"""torch.compile, block by block."""

from typing import Any

import torch
from torch import nn

from linattn.support.options import OptionError

# Inductor joins sums over rows with sums over columns in one kernel. Up to torch 2.13 at least that kernel returns some
# gradients in a wrong shape or never writes them (pytorch issues 178080 and 193061): mirror's reflection met it.
_UNSAFE = "mix_order_reduction"


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile each block of ``model.blocks`` in place; ``options`` go to ``torch.compile``.

    Blocks and not the whole model: equal blocks share one compiled graph, so that a deep model costs the compile time
    of one block. In place and not wrapped: names of parameters, and with them checkpoints, stay as they are.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
        raise OptionError("compile", f"needs a model with a list of blocks, {type(model).__name__} has none")
    # Blocks that differ in a number, such as the rate of DropPath, are graphs of their own, and so is evaluation; past
    # its limit torch would go on without compiling, in silence.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(blocks))
    if "backend" not in options:
        options = {"options": safe_options()} | options
    for block in blocks:
        block.compile(**options)


def safe_options() -> dict[str, Any]:
    """Options of inductor that leave out what is known to give wrong gradients."""
    from torch._inductor import config

    return {f"triton.{_UNSAFE}": False} if hasattr(config.triton, _UNSAFE) else {}
