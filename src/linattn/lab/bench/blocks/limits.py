"""Predicts the cost of a block from fewer tokens, so that no row starts that cannot end.

A GPU reports when its memory is full, while the system of a CPU kills the process. So memory is predicted on a CPU, and
tried on a GPU unless a limit was given.
"""

from dataclasses import dataclass

from linattn.lab.bench.blocks.settings import BlocksConfig
from linattn.lab.bench.blocks.subjects import BlockContender, draw_tokens, training_pass
from linattn.lab.bench.limits import LARGEST_STEP, gib
from linattn.lab.bench.memory import free_bytes, peak_bytes
from linattn.lab.bench.timing import seconds_of
from linattn.models.vision.block import Block

FIRST_PROBE = 64


@dataclass(frozen=True)
class BlockCost:
    """Cost of one pass."""

    tokens: int
    seconds: float
    peak: float

    def at(self, tokens: int, growth: int) -> "BlockCost":
        factor = (tokens / self.tokens) ** growth
        return BlockCost(tokens, self.seconds * factor, self.peak * factor)


class BlockLimits:
    """Remembers measured costs, probes fewer tokens if nothing near was measured, and says what is too much."""

    def __init__(self, config: BlocksConfig) -> None:
        self.config, self.device = config, config.torch_device
        self.max_bytes = float("inf")
        if config.max_gib is not None:
            self.max_bytes = config.max_gib * 2**30
        elif self.device.type != "cuda":
            self.max_bytes = free_bytes(self.device) / 2
        self._known: dict[str, BlockCost] = {}

    def learn(self, contender: BlockContender, cost: BlockCost) -> None:
        self._known[contender.name] = cost

    def reason_to_leave_out(self, contender: BlockContender, block: Block, tokens: int) -> str:
        """Why a row is too costly; empty if it is not. Probes steps of at most a factor of four on the way."""
        known = self._known.get(contender.name) or self._probe(contender, block, min(FIRST_PROBE, tokens))
        while known.tokens * LARGEST_STEP < tokens:
            step = known.at(known.tokens * LARGEST_STEP, contender.growth)
            if self._excess(step):
                break
            known = self._probe(contender, block, step.tokens)
        return self._excess(known.at(tokens, contender.growth))

    def _excess(self, cost: BlockCost) -> str:
        if cost.peak > self.max_bytes:
            return f"about {gib(cost.peak)}, limit {gib(self.max_bytes)}"
        if cost.seconds > self.config.max_seconds:
            return f"about {cost.seconds:.3g} s a pass, limit {self.config.max_seconds:g} s"
        return ""

    def _probe(self, contender: BlockContender, block: Block, tokens: int) -> BlockCost:
        call = training_pass(block, draw_tokens(self.config, tokens, self.config.batch), self.config.autocast)
        peak = peak_bytes(call, self.device)
        cost = BlockCost(tokens, min(seconds_of(call, self.device) for _ in range(2)), peak)
        self.learn(contender, cost)
        return cost
