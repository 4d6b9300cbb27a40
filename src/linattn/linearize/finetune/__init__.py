"""Stage 2: the projections around the converted attention get used to it, through low-rank adapters."""

from linattn.linearize.finetune.options import FinetuneOptions
from linattn.linearize.finetune.stage import FinetuneResult, finetune

__all__ = ["FinetuneOptions", "FinetuneResult", "finetune"]
