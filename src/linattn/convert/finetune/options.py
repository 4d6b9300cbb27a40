"""Options for training the low-rank adapters."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from linattn.convert.training.setting import StageOptions
from linattn.support.checks import check_integer, check_number
from linattn.support.options import OptionError, check_option

Objective = Literal["distill", "next_token", "mix"]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(StageOptions):
    """Options for training the low-rank adapters.

    Example:
        >>> FinetuneOptions(rank=0).check()
        Traceback (most recent call last):
        linattn.support.options.OptionError: rank: must be an integer of at least 1, got 0
    """

    steps: int = 100
    lr: float = 5e-4
    rank: int = 8
    alpha: float = 16.0
    """The adapters' output is scaled by ``alpha / rank``."""
    targets: tuple[str, ...] | None = None
    """Names of the projections that get adapters; None: those that the family's adapter names for the attention."""
    objective: Objective = "distill"
    """``"distill"``: match the teacher's distribution over tokens (for an encoder without a head, its last hidden
    states); ``"next_token"``: predict the text itself; ``"mix"``: both."""
    distill_weight: float = 0.5
    """Weight of the teacher's part in ``"mix"``."""
    pooled_weight: float = 1.0
    """For an encoder without a head: weight of the mean over tokens in ``"distill"``, beside that of each token."""
    hidden_weight: float = 0.0
    """Weight of the hidden states after every layer, distilled beside the teacher's answer; 0: the answer alone."""
    train_cores: bool = False
    """Also train what stage 1 has trained, at the same learning rate."""
    scale_factor: float = 1.0
    """Factor of the learning rate for the cores' scales (``log_weight``, ``log_alpha``), if the cores are trained: how
    the linear part weighs against the exact one depends on the number of tokens, and this stage may have longer
    sequences."""
    accumulation: int = 1
    """Into how many parts a step's sequences are split, computed one after another: less memory, the same step."""

    def check(self) -> None:
        super().check()
        check_integer("rank", self.rank, 1)
        check_number("alpha", self.alpha, above=0)
        names = self.targets is None or (
            isinstance(self.targets, tuple | list) and all(isinstance(name, str) for name in self.targets)
        )
        if not names or self.targets == ():
            raise OptionError("targets", f"must be names in a tuple, or None, got {self.targets!r}")
        if not isinstance(self.train_cores, bool):
            raise OptionError("train_cores", f"must be True or False, got {self.train_cores!r}")
        check_option("objective", self.objective, get_args(Objective))
        check_number("distill_weight", self.distill_weight, least=0, most=1)
        for name in ("pooled_weight", "hidden_weight"):
            check_number(name, getattr(self, name), least=0)
        check_number("scale_factor", self.scale_factor, above=0)
        if self.hidden_weight and self.objective == "next_token":
            raise OptionError("hidden_weight", "needs a teacher: objective must be distill or mix, got next_token")
        check_integer("accumulation", self.accumulation, 1)
        if self.batch_size % self.accumulation:
            raise OptionError("accumulation", f"must divide batch_size = {self.batch_size}, got {self.accumulation}")

    def fingerprint(self) -> dict[str, Any]:
        found = super().fingerprint()
        if self.scale_factor == 1.0:
            del found["scale_factor"]  # so that runs from before this option existed can go on
        return found | {"targets": None if self.targets is None else list(self.targets)}
