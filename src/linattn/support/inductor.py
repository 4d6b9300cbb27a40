"""What ``torch.compile`` must leave out: optimisations of inductor that were seen to give wrong gradients."""

from typing import Any


def safe_options() -> dict[str, Any]:
    """Options for ``torch.compile(..., options=...)``.

    - ``triton.mix_order_reduction`` joins sums over rows with sums over columns. Up to torch 2.13 at least that kernel
      returns some gradients in a wrong shape or never writes them (pytorch issues 178080 and 193061).
    - ``loop_ordering_after_fusion`` turns loops round so that more can be joined. With torch 2.11 the gradients of
      ``focused`` and ``pola``, compiled in bf16, were off by factors of 1e4 and differed from run to run.
    """
    from torch._inductor import config

    found: dict[str, Any] = {}
    if hasattr(config.triton, "mix_order_reduction"):
        found["triton.mix_order_reduction"] = False
    if hasattr(config, "loop_ordering_after_fusion"):
        found["loop_ordering_after_fusion"] = False
    return found
