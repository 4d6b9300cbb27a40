"""Rows of results, and what is derived from them."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from linattn.lab.bench.contenders import SDPA
from linattn.lab.bench.fit import growth_exponent

Status = Literal["ok", "WRONG", "left out", "failed"]


@dataclass
class Row:
    """One contender at one length in one pass. Times are ms of one call, errors relative to max(abs(reference))."""

    contender: str
    length: int
    pass_name: str
    status: Status
    reason: str = ""  # why it was left out or failed
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repeats: int | None = None
    peak_bytes: int | None = None
    peak_over_qkvo: float | None = None  # peak / bytes of q, k, v and the output
    error: float | None = None
    budget: float | None = None
    worst_tensor: str = ""
    checked_against: str = ""
    speedup_over_sdpa: float | None = None  # time of sdpa / time of this row
    speedup_over_chunked: float | None = None


@dataclass
class Result:
    """All results of one run, as they are written to the JSON file."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    @property
    def right(self) -> bool:
        """Whether nothing that ran was wrong, and nothing that should run failed."""
        return not any(row.status in ("WRONG", "failed") for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._compare(row.length, row.pass_name)

    def _compare(self, length: int, pass_name: str) -> None:
        peers = [r for r in self.rows if (r.length, r.pass_name) == (length, pass_name) and r.median_ms]
        times = {r.contender: r.median_ms for r in peers}
        for row in peers:
            assert row.median_ms
            sdpa, chunked = times.get(SDPA), times.get("chunked")
            row.speedup_over_sdpa = sdpa / row.median_ms if sdpa else None
            row.speedup_over_chunked = chunked / row.median_ms if chunked else None

    def times(self, contender: str, pass_name: str) -> dict[int, float]:
        """Milliseconds by length; a wrong row has no time worth knowing."""
        return {
            r.length: r.median_ms
            for r in self.rows
            if (r.contender, r.pass_name, r.status) == (contender, pass_name, "ok") and r.median_ms
        }

    def series(self) -> list[tuple[str, str]]:
        """Every (contender, pass), in the order in which they came."""
        return list(dict.fromkeys((r.contender, r.pass_name) for r in self.rows))

    def growth(self) -> list[dict[str, Any]]:
        """The exponent of ``time ~ T^p`` for each series."""
        found = []
        for contender, pass_name in self.series():
            times = self.times(contender, pass_name)
            exponent = growth_exponent(times)
            if exponent is not None:
                found.append({"contender": contender, "pass_name": pass_name, "exponent": exponent})
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "meta": {**self.meta, "interrupted": self.interrupted},
            "rows": [asdict(row) for row in self.rows],
            "growth": self.growth(),
        }
