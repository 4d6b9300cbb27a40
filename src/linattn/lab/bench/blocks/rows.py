"""Rows of memory by the number of tokens, and what is derived from them."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SOFTMAX, SOFTMAX_MAP = "softmax", "softmax (map)"
Status = Literal["ok", "WRONG", "out of memory", "left out", "failed"]


@dataclass
class BlockRow:
    """Forward and backward of one block; error and budget are those of the check, relative to max(abs(exact))."""

    contender: str
    tokens: int
    status: Status = "ok"
    reason: str = ""  # why there are no numbers
    peak_bytes: int | None = None
    seconds: float | None = None  # median
    repeats: int | None = None
    error: float | None = None
    budget: float | None = None
    worst_tensor: str = ""
    checked_against: str = ""


@dataclass(frozen=True)
class Reduction:
    """``percent`` less memory than ``against`` at the largest number of tokens where both fit; below 0: more memory."""

    contender: str
    against: str
    tokens: int
    percent: float

    def __str__(self) -> str:
        word = "less" if self.percent >= 0 else "more"
        return f"{abs(self.percent):.1f} % {word} than {self.against} at {self.tokens:,} tokens"


@dataclass
class BlocksResult:
    """All results of one run, as they are written to the JSON file."""

    meta: dict[str, Any]
    rows: list[BlockRow] = field(default_factory=list)
    interrupted: bool = False

    @property
    def right(self) -> bool:
        """Whether nothing was wrong or failed; that a block does not fit is a result, not a failure."""
        return not any(row.status in ("WRONG", "failed") for row in self.rows)

    def contenders(self) -> list[str]:
        return list(dict.fromkeys(row.contender for row in self.rows))

    def peaks(self, contender: str) -> dict[int, int]:
        """Peak bytes by number of tokens, for the rows that count."""
        rows = (row for row in self.rows if row.contender == contender and row.status == "ok")
        return {row.tokens: row.peak_bytes for row in rows if row.peak_bytes is not None}

    def reduction(self, contender: str, against: str) -> Reduction | None:
        """The reduction, or None if no number of tokens was measured for both."""
        own, other = self.peaks(contender), self.peaks(against)
        shared = own.keys() & other.keys()
        if not shared:
            return None
        tokens = max(shared)
        return Reduction(contender, against, tokens, 100 * (1 - own[tokens] / other[tokens]))

    def reductions(self) -> list[Reduction]:
        """Reductions of every mechanism against softmax with and without its map."""
        mechanisms = [name for name in self.contenders() if name not in (SOFTMAX, SOFTMAX_MAP)]
        found = (self.reduction(name, against) for name in mechanisms for against in (SOFTMAX_MAP, SOFTMAX))
        return [reduction for reduction in found if reduction is not None]

    def as_json(self) -> dict[str, Any]:
        return {
            "meta": {**self.meta, "interrupted": self.interrupted},
            "rows": [asdict(row) for row in self.rows],
            "reductions": [asdict(reduction) for reduction in self.reductions()],
        }
