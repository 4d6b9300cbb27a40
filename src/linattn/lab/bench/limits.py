"""Predicts the cost of a contender from shorter lengths, so that no row starts that cannot end."""

from dataclasses import dataclass

import torch

from linattn.lab.bench.contenders import SDPA, Contender
from linattn.lab.bench.inputs import make_inputs
from linattn.lab.bench.memory import free_bytes, peak_bytes
from linattn.lab.bench.passes import grad_like, make_call, make_fresh_call
from linattn.lab.bench.settings import BenchConfig
from linattn.lab.bench.timing import seconds_of

FIRST_PROBE = 32
LARGEST_STEP = 4
PROBE_REPEATS = 4
# Every row is compared with softmax attention, so softmax may take longer than others before it is left out.
PATIENCE_WITH_SDPA = 12


@dataclass(frozen=True)
class Cost:
    """Cost of one call at one length."""

    length: int
    seconds: float
    peak: float

    def at(self, length: int, contender: Contender) -> "Cost":
        factor = length / self.length
        return Cost(length, self.seconds * factor**contender.time_growth, self.peak * factor**contender.memory_growth)


class Limits:
    """Remembers measured costs, probes short lengths if nothing near was measured, and says what is too much."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.device = config.torch_device
        given = config.max_gib
        self.max_bytes = free_bytes(self.device) / 2 if given is None else given * 2**30
        self._known: dict[tuple[str, str], Cost] = {}

    def learn(self, contender: Contender, pass_name: str, cost: Cost) -> None:
        self._known[contender.name, pass_name] = cost

    def predict(self, contender: Contender, pass_name: str, length: int) -> Cost:
        """Predict from the longest length seen; probes steps of at most a factor of four while they are allowed."""
        known = self._known.get((contender.name, pass_name))
        if known is None or known.length > length:
            known = self._probe(contender, pass_name, min(FIRST_PROBE, length))
        while known.length * LARGEST_STEP < length:
            step = known.at(known.length * LARGEST_STEP, contender)
            if self.reason_to_leave_out(contender, step):
                break
            known = self._probe(contender, pass_name, step.length)
        return known.at(length, contender)

    def reason_to_leave_out(self, contender: Contender, cost: Cost) -> str:
        """Why a row is too costly; empty if it is allowed."""
        seconds = self.config.max_seconds * (PATIENCE_WITH_SDPA if contender.name == SDPA else 1)
        if cost.peak > self.max_bytes:
            return f"about {gib(cost.peak)}, limit {gib(self.max_bytes)}"
        if cost.seconds > seconds:
            return f"about {cost.seconds:.3g} s a call, limit {seconds:g} s"
        return ""

    def _probe(self, contender: Contender, pass_name: str, length: int) -> Cost:
        inputs = make_inputs(self.config, length)
        call = make_call(contender, inputs, pass_name, grad_like(inputs, self.config.seed))
        # The best of a few: one hiccup must not be extrapolated until the contender is left out.
        seconds = min(seconds_of(call, self.device) for _ in range(PROBE_REPEATS))
        weighed = min(length, contender.longest_weighed or length)
        peak = peak_bytes(make_fresh_call(contender, inputs.cut(0, weighed), pass_name), self.device)
        cost = Cost(length, seconds, Cost(weighed, 0, peak).at(length, contender).peak)
        self.learn(contender, pass_name, cost)
        return cost


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.3g} GiB"


def bytes_of_qkvo(config: BenchConfig, length: int) -> int:
    """The least number of bytes that attention must read and write."""
    item = torch.empty((), dtype=config.torch_dtype).element_size()
    return 4 * config.batch * config.heads * length * config.head_dim * item
