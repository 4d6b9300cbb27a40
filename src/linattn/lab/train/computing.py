"""Options of how a training step is computed, the same for images and for text."""

from dataclasses import dataclass
from typing import Literal

from linattn.support.config import Config, option

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Computing(Config):
    """How steps are computed, and how often a run is saved."""

    precision: Precision = option(
        "fp32", "Precision of what is computed, in autocast; weights and optimiser stay fp32.", group="Machine",
        default_text="bf16 on cuda",
    )  # fmt: skip
    compile: bool = option(False, "Compile the blocks.", group="Machine", default_text="on cuda alone")
    graphs: bool | None = option(
        False, "Replay steps as CUDA graphs, which saves the host most of its work.", group="Machine", affects=False
    )
    checkpoint_seconds: float = option(
        300.0, "Longest time between two checkpoints; an evaluation ends in one.", above=0, group="Machine",
        affects=False, rare=True,
    )  # fmt: skip
