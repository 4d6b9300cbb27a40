"""Measures row after row within a time limit, as all benchmarks of language models do."""

import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from linattn.lab.bench.blocks.run import outcome
from linattn.lab.bench.children import check_alive
from linattn.lab.bench.kernels.clock import TimeLimitError
from linattn.lab.bench.language.rows import LanguageResult, LanguageRow
from linattn.lab.bench.language.settings import LanguageConfig


class Subject(Protocol):
    """One mechanism, with what its rows share."""

    def fill(self, row: Any) -> None: ...


def measure_rows(
    config: LanguageConfig,
    result: LanguageResult[Any],
    rows: Iterable[LanguageRow],
    subject_of: Callable[[str], Subject],
    *,
    on_row: Callable[[Any], None],
    on_begin: Callable[[Any], None],
) -> LanguageResult[Any]:
    """Measure ``rows``, which come mechanism by mechanism, and put them into ``result``.

    A row that is broken or does not fit costs only itself. Ctrl-C keeps the rows that are done.
    """
    deadline, device = time.perf_counter() + config.seconds, config.torch_device
    subject, owner = None, ""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for row in rows:
                if row.mechanism != owner:
                    subject, owner = None, row.mechanism
                    clean(device)
                if time.perf_counter() > deadline:
                    row.status, row.reason = "left out", f"the {config.seconds:g} seconds did not suffice"
                else:
                    on_begin(row)
                    try:
                        subject = subject or subject_of(owner)
                        subject.fill(row)
                    except TimeLimitError as error:
                        row.status, row.reason = "left out", str(error)
                    except Exception as error:
                        row.status, row.reason = outcome(error)
                result.put(row)
                on_row(row)
                if row.status in ("failed", "out of memory"):
                    clean(device)  # the error held every tensor
                    if device.type == "cuda":
                        check_alive(device)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
