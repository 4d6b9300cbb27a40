"""Stage 2: low-rank adapters let the projections adjust to the converted attention around them."""

from linattn.convert.finetune.options import FinetuneOptions
from linattn.convert.finetune.stage import FinetuneResult, finetune

__all__ = ["FinetuneOptions", "FinetuneResult", "finetune"]
