"""torch.compile, block by block."""

from typing import Any

import torch
from torch import nn

from linattn.support.inductor import safe_options
from linattn.support.options import OptionError


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
