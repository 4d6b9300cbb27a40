"""torch.compile, block by block, without inductor options that are known to give wrong results."""

from typing import Any

import torch
from torch import nn

from linattn.support.options import OptionError


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile each block of ``model.blocks`` in place; ``options`` go to ``torch.compile``.

    Equal blocks share one compiled graph: a deep model only costs the compile time of one block. They are compiled in
    place, so that the names of parameters, and with them checkpoints, stay as they are.

    Shapes are fixed: a backbone has separate graphs for its stages. By default torch takes the second stage for a sign
    that sizes vary, and compiles the others for planes of unknown height and width: tracing took four times as long,
    and torch 2.11 then failed to generate code for a CPU. A model whose inputs do vary from batch to batch says so by
    ``dynamic_shapes = None`` (torch finds out) or True.

    ``options`` may include a ``mode``, such as ``"reduce-overhead"`` for CUDA graphs.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
        raise OptionError("compile", f"needs a model with a list of blocks, {type(model).__name__} has none")
    make_room(4 * len(blocks))
    drops: list[Any] = [module for module in blocks.modules() if hasattr(module, "rate_to_tensor")]
    if any(drop.rate for drop in drops):  # one graph serves all rates of skipped branches; each would have its own else
        place = next(blocks.parameters(), torch.empty(0)).device
        for drop in drops:
            drop.rate_to_tensor(place)
    options = {"dynamic": getattr(model, "dynamic_shapes", False)} | options
    if not options.keys() & {"backend", "options"}:
        options["options"] = safe_options(options.pop("mode", None))
    for block in blocks:
        block.compile(**options)


def make_room(graphs: int) -> None:
    """Raise by ``graphs`` the number of compiled graphs that torch keeps for one function.

    Blocks that differ in a shape or a number have separate graphs, and so does evaluation. To torch, all blocks of all
    models in a process are one function, and past its limit it silently continues without compiling. Searching through
    the graphs of many models takes time at every call: call ``torch.compiler.reset()`` between models.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit += graphs
    # The limit over all functions; the blocks' parts count separately where a graph breaks.
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * dynamo.recompile_limit)


def safe_options(mode: str | None = None) -> dict[str, Any]:
    """Options for ``torch.compile(..., options=...)``, plus those of ``mode``, which it does not accept beside them.

    - ``triton.mix_order_reduction`` joins sums over rows with sums over columns. Up to torch 2.13 at least that kernel
      returns some gradients in a wrong shape or never writes them (pytorch issues 178080 and 193061).
    - ``loop_ordering_after_fusion`` reorders loops so that more can be joined. With torch 2.11 the gradients of
      ``focused`` and ``pola``, compiled in bf16, were off by factors of 1e4 and differed from run to run.
    - ``comprehensive_padding`` lays intermediate tensors out with gaps. With torch 2.11 the gradients of ``pola`` in
      the chunked form were then off by more than their size, in fp32 too.
    """
    from torch._inductor import config, list_mode_options

    found: dict[str, Any] = {} if mode is None else dict(list_mode_options(mode))
    if hasattr(config.triton, "mix_order_reduction"):
        found["triton.mix_order_reduction"] = False
    for name in ("loop_ordering_after_fusion", "comprehensive_padding"):
        if hasattr(config, name):
            found[name] = False
    return found
