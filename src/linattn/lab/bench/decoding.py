"""`linattn decoding`: time and memory of a decoded token by the context."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from linattn.lab.bench.benchmark import SOFTMAX, note, setting
from linattn.lab.bench.charts import by_length
from linattn.lab.bench.check import watch_choices
from linattn.lab.bench.decoder import (
    CHECKED_TOKENS,
    EXACT_UP_TO,
    Decoder,
    DecodingTruth,
    Prefix,
    state_bytes,
    use_static_cache,
)
from linattn.lab.bench.fit import crossovers, times_by
from linattn.lab.bench.hosts import variant
from linattn.lab.bench.language import LanguageBenchmark, create_model, draw_text
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.running import Absent, Row, shared
from linattn.lab.bench.timing import Timing, seconds_of
from linattn.lab.cases import Case, Work
from linattn.lab.page.plots import Chart, styles
from linattn.mechanisms.registry import mechanism_info
from linattn.support.config import option
from linattn.support.options import OptionError

EAGER, GRAPH = "eager", "cuda-graph"
WARM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Decoding(LanguageBenchmark):
    """Time and memory of a decoded token against the context, for a language model of 135 million parameters.

    The same model with softmax stands beside the mechanisms, its keys and values in a cache that is allocated once and
    written in place. Before a row is timed, the logits of its steps are checked against those of the whole context read
    at once in higher precision. The context is read in pieces, and its state is what the steps start from.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (what is done is kept).
    """

    contexts: tuple[int, ...] = option(
        (), "Tokens before the one that is decoded, with commas.", least=1, affects=False,
        default_text="1024 to 131072 by factors of two, with --quick 24,48,96",
    )  # fmt: skip
    batch: tuple[int, ...] = option((1, 16), "Sequences decoded together, with commas.", least=1, affects=False)
    modes: tuple[str, ...] = option(
        (), "How a step runs, with commas: eager, cuda-graph (captured and replayed).", choices=(EAGER, GRAPH),
        affects=False, default_text="both, on a CPU eager",
    )  # fmt: skip
    steps: int = option(16, "Tokens that are timed for a row.", least=1)
    piece: int = option(8192, "Tokens of a context that are read at a time.", least=1)

    name: ClassVar[str] = "decoding"
    keys: ClassVar[tuple[str, ...]] = ("mechanism", "context", "batch", "mode")
    columns: ClassVar[tuple[str, ...]] = (
        "batch", "mode", "context", "mechanism", "median_ms", "spread", "of_softmax", "state_MiB", "total_MiB", "budget"
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        for name in self.mechanisms:
            if mechanism_info(variant(name)[0]).state == "none":
                raise OptionError("mechanisms", f"{name} has no recurrent form, so no state to decode from")

    def filled(self) -> Self:
        contexts = self.contexts or ((24, 48, 96) if self.quick else tuple(2**n for n in range(10, 18)))
        modes = self.modes or ((EAGER, GRAPH) if self.on_gpu else (EAGER,))
        return replace(super().filled(), contexts=tuple(sorted(set(contexts))), modes=modes)

    def cases(self) -> list[dict[str, Any]]:
        """Mechanism by mechanism, from short to long contexts, as each continues the one before it."""
        config = self.filled()
        return [
            self.case(mechanism=name, context=context, batch=batch, mode=mode, longest=config.contexts[-1])
            for name in self.subjects for context in config.contexts
            for batch in dict.fromkeys(self.batch) for mode in config.modes
        ]  # fmt: skip

    def warm(self, case: Case) -> None:
        """Run one layer: every kernel that the row will call."""
        subject = _Subject(self, case, depth=1)
        decoder = subject.decoder(case)
        subject.truth.check(decoder.read(subject.text[case["context"] : case["context"] + 1]), case["context"])

    def fill(self, case: Case, work: Work, row: Row) -> None:
        mechanism, context = case["mechanism"], case["context"]
        device = self.place()
        if case["mode"] == GRAPH and device.type != "cuda":
            raise Absent("CUDA graphs need a GPU")
        work.tell(0.0, "reading the context")
        key = "decoding", mechanism, case["longest"], str(case["settings"])
        subject = shared(key, lambda: _Subject(self, case))
        decoder = subject.decoder(case)
        weights = sum(p.nbytes for p in subject.model.parameters())
        row |= {"prefill_seconds": subject.prefix.seconds, "weight_bytes": weights}
        row["state_bytes"] = state_bytes(decoder.states)
        work.tell(0.4, "a first step")
        with watch_choices() as choices:
            decoder.step()  # libraries allocate their workspaces, which are not memory of a step
        row["explain"] = dict(Counter(map(str, choices)))
        if mechanism == SOFTMAX:
            row["explain"] = {
                "scaled_dot_product_attention over the filled slots of a cache": len(subject.model.blocks)
            }
        decoder.restart()
        # A graph allocates when it is captured.
        row["peak_bytes"] = peak_bytes(decoder.capture if case["mode"] == GRAPH else decoder.step, device)
        row["total_bytes"] = row["state_bytes"] + weights + row["peak_bytes"]
        if case["mode"] == GRAPH and not decoder.captured:
            raise Absent("the step cannot be captured as a CUDA graph")
        work.tell(0.5, "checking")
        decoder.restart()
        count = CHECKED_TOKENS if decoder.steps_follow else 1
        if not note(row, subject.truth.check(decoder.read(subject.text[context : context + count]), context)):
            return
        work.tell(0.8, "timing")
        decoder.restart()
        samples = [seconds_of(decoder.step, device) for _ in range(WARM_STEPS + self.steps)]
        timing = Timing.of(samples[WARM_STEPS:])
        row |= timing.row() | {"tokens_per_second": case["batch"] / timing.median}

    def derived(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            same = {"batch": row["batch"], "mode": row["mode"]}
            softmax = times_by(rows, "context", mechanism=SOFTMAX, **same).get(row["context"])
            if row.get("median_ms") and softmax:
                row["of_softmax"] = row["median_ms"] / softmax
        return sorted(rows, key=lambda row: (row["batch"], row["mode"], row["context"]))

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return self.overtaken(overtakes(rows), rows)

    def charts(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Chart]:
        """Time and memory, of CUDA graphs if there are any."""
        looks, panels = styles(list(dict.fromkeys(row["mechanism"] for row in rows))), []
        mode = GRAPH if any(row["mode"] == GRAPH and row["status"] == "ok" for row in rows) else EAGER
        for value, ylabel, unit in (("median_ms", "ms a token", 1), ("total_bytes", "MiB with weights", 2**20)):
            for batch in sorted({row["batch"] for row in rows}):
                own = [row for row in rows if (row["batch"], row["mode"]) == (batch, mode)]
                marks = [at["length"] for at in overtakes(own) if at["length"]] if value == "median_ms" else []
                what = value, f"batch {batch}, {mode}", ylabel, unit
                panels.append(by_length(own, "mechanism", "context", *what, looks, xlabel="context", marks=marks))
        title = setting(meta, f"decoding, {meta['settings']['dtype']}")
        return [Chart("decoding", title, "Dotted: faster than softmax from there on.", panels, looks)]


def overtakes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where mechanisms become faster than softmax, for each batch size and mode."""
    settings = dict.fromkeys((row["batch"], row["mode"]) for row in rows if row["status"] != "absent")
    return [
        own for batch, mode in settings
        for own in crossovers(rows, "context", SOFTMAX, f"batch {batch}, {mode}", batch=batch, mode=mode)
    ]  # fmt: skip


class _Subject:
    """The model with one mechanism; its rows share the states after a context, and the exact values."""

    def __init__(self, config: Decoding, case: Case, depth: int | None = None) -> None:
        self.config, mechanism, device = config, case["mechanism"], config.place()
        self.text = draw_text(config.size, (case["longest"] + CHECKED_TOKENS,), device, config.seed)
        model = create_model(config.size, mechanism, device, config.seed, depth=depth)
        self.model = model.to(getattr(torch, config.dtype)).eval()
        if mechanism == SOFTMAX:
            use_static_cache(self.model)
        quadratic = mechanism_info(variant(mechanism)[0]).cost == "quadratic"
        self.truth = DecodingTruth(self.model, self.text, EXACT_UP_TO if quadratic and config.on_gpu else None)
        self.prefix = Prefix(self.model, self.text, config.piece)

    def decoder(self, case: Case) -> Decoder:
        states = self.prefix.reach(case["context"])
        room = max(CHECKED_TOKENS, WARM_STEPS + self.config.steps)
        return Decoder(self.model, states, case["context"], case["batch"], room, static=case["mode"] == GRAPH)
