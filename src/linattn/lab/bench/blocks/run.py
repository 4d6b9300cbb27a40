"""Measures memory by tokens: forward and backward of one block, each contender checked, weighed and timed."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from linattn.lab.bench.blocks.check import check_block
from linattn.lab.bench.blocks.limits import BlockCost, BlockLimits
from linattn.lab.bench.blocks.rows import BlockRow, BlocksResult, Status
from linattn.lab.bench.blocks.settings import BlocksConfig
from linattn.lab.bench.blocks.subjects import BlockContender, draw_tokens, make_block_contenders, training_pass
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.oracle import Verdict
from linattn.lab.bench.timing import measure_in_turns
from linattn.models.vision.block import Block

OnRow = Callable[[BlockRow], None]
OnWork = Callable[[str], None]


def run_blocks(
    config: BlocksConfig,
    result: BlocksResult,
    *,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
) -> BlocksResult:
    """Fill ``result``, row by row, from few tokens to many; ``on_row`` is called after each row.

    Ctrl-C ends the run early and keeps the rows that are done: ``result.interrupted`` is then True.

    Example:
        >>> config = BlocksConfig(tokens=(16,), mechanisms=("relu",), dim=16, heads=2, repeats=1)
        >>> rows = run_blocks(config, BlocksResult(config.describe(["example"]))).rows
        >>> [(row.contender, row.status) for row in rows]
        [('softmax', 'ok'), ('softmax (map)', 'ok'), ('relu', 'ok')]
    """
    config.check()
    try:
        with _current(config.torch_device):
            run = _Run(config, on_work)
            for tokens in sorted(set(config.tokens)):
                for contender in run.contenders:
                    row = run.row(contender, tokens)
                    result.rows.append(row)
                    on_row(row)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def number_of_block_rows(config: BlocksConfig) -> int:
    return len(set(config.tokens)) * len(make_block_contenders(config))


class _Run:
    def __init__(self, config: BlocksConfig, on_work: OnWork) -> None:
        self.config, self.device, self.on_work = config, config.torch_device, on_work
        self.contenders = make_block_contenders(config)
        self.limits = BlockLimits(config)
        self._blocks: dict[str, Block] = {}
        self._verdicts: dict[str, Verdict] = {}

    def row(self, contender: BlockContender, tokens: int) -> BlockRow:
        row = BlockRow(contender.name, tokens)
        try:
            self._fill(row, contender, tokens)
        except Exception as error:
            # A contender that does not fit, or is broken, must not take the others' rows with it.
            row.status, row.reason = outcome(error)
        if row.status in ("out of memory", "failed"):
            gc.collect()  # only now: the error's traceback held every tensor of the pass
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # so that no row meets memory fragmented by earlier ones
        return row

    def _fill(self, row: BlockRow, contender: BlockContender, tokens: int) -> None:
        def work(what: str) -> None:
            self.on_work(f"{tokens} tokens: {contender.name}, {what}")

        if contender.name not in self._verdicts:
            work("checking")
            block = self._blocks[contender.name] = contender.create(self.config)
            # In the check libraries also allocate their workspaces, which are then not counted.
            self._verdicts[contender.name] = check_block(contender, block, self.config)
        block, verdict = self._blocks[contender.name], self._verdicts[contender.name]
        row.error, row.budget, row.checked_against = verdict.error, verdict.budget, verdict.against
        row.worst_tensor = verdict.worst
        if not verdict.ok:
            row.status, row.reason = "WRONG", f"{verdict.worst} is off by {verdict.error:.1e}"
            return
        work("predicting")
        row.reason = self.limits.reason_to_leave_out(contender, block, tokens)
        if row.reason:
            row.status = "left out"
            return
        call = training_pass(block, draw_tokens(self.config, tokens, self.config.batch), self.config.autocast)
        work("weighing")
        peak = peak_bytes(call, self.device)
        work("timing")
        timings = measure_in_turns({"": call}, self.device, min_seconds=0, min_repeats=self.config.repeats)
        row.peak_bytes, row.seconds, row.repeats = peak, timings[""].median, timings[""].repeats
        self.limits.learn(contender, BlockCost(tokens, row.seconds, peak))


def outcome(error: Exception) -> tuple[Status, str]:
    """The status of an error, out of memory or another failure, with its reason in one line."""
    text = " ".join(str(error).split())
    full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
    if full:
        # The first sentence has the numbers too; what follows them is advice about the allocator's settings.
        return "out of memory", ". ".join(text.removeprefix("CUDA out of memory. ").split(". ")[:2]).rstrip(".")
    return "failed", f"{type(error).__name__}: {text[:200]}"


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current GPU, which events and memory statistics refer to."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
