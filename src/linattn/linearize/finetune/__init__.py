"""Stage 2: low-rank adapters let the projections adjust to the converted attention around them."""

from linattn.linearize.finetune.options import FinetuneOptions
from linattn.linearize.finetune.stage import FinetuneResult, finetune

__all__ = ["FinetuneOptions", "FinetuneResult", "finetune"]
