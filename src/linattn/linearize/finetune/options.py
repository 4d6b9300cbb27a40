"""How the low-rank adapters are trained."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from linattn.linearize.training.setting import StageOptions
from linattn.support.options import OptionError, check_option
from linattn.train.checks import check_integer, check_number

Objective = Literal["distill", "next_token", "mix"]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(StageOptions):
    """How the low-rank adapters are trained.

    Example:
        >>> FinetuneOptions(rank=0).check()
        Traceback (most recent call last):
        linattn.support.options.OptionError: rank: must be an integer of at least 1, got 0
    """

    steps: int = 100
    lr: float = 5e-4
    rank: int = 8
    alpha: float = 16.0
    """Adapters count ``alpha / rank`` times."""
    targets: tuple[str, ...] | None = None
    """Names of the projections that get adapters; None: those of the attention, as the family's adapter names them."""
    objective: Objective = "distill"
    """``"distill"``: the teacher's distribution over tokens (an encoder without a head: its last hidden states);
    ``"next_token"``: the text itself; ``"mix"``: both."""
    distill_weight: float = 0.5
    """Of the teacher in ``"mix"``."""
    pooled_weight: float = 1.0
    """Of an encoder without a head: how much the mean over tokens counts in ``"distill"``, beside the tokens."""
    hidden_weight: float = 0.0
    """Of the hidden states after every layer, which are distilled beside the teacher's answer; 0: only that."""
    train_cores: bool = False
    """Train what stage 1 has trained too, with the same rate."""
    scale_factor: float = 1.0
    """Of the learning rate of the cores' scales (``log_weight``, ``log_alpha``) among them: what weighs the linear part
    against the exact one depends on how many tokens there are, and longer sequences may come in this stage."""
    accumulation: int = 1
    """Parts that a step's sequences are computed in, one after another: less memory, the same step."""

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
            del found["scale_factor"]  # runs from before there was one go on
        return found | {"targets": None if self.targets is None else list(self.targets)}
