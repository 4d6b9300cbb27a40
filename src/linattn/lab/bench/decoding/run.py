"""The decoding benchmark: mechanism by mechanism, from short to long contexts, in every batch size and mode."""

from collections.abc import Callable

from linattn.lab.bench.choices import watch_choices
from linattn.lab.bench.decoding.cache import state_bytes, use_static_cache
from linattn.lab.bench.decoding.check import CHECKED_TOKENS, EXACT_UP_TO, DecodingTruth
from linattn.lab.bench.decoding.decoder import Decoder
from linattn.lab.bench.decoding.prefix import Prefix
from linattn.lab.bench.decoding.rows import DecodingResult, DecodingRow
from linattn.lab.bench.decoding.settings import GRAPH, DecodingConfig
from linattn.lab.bench.language.loop import measure_rows
from linattn.lab.bench.language.model import create_model, draw_text
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.models.cases import SOFTMAX, variant
from linattn.lab.bench.timing import Timing, seconds_of
from linattn.mechanisms.registry import mechanism_info

WARM_STEPS = 2
OnRow = Callable[[DecodingRow], None]
OnWork = Callable[[str], None]


def run_decoding(
    config: DecodingConfig,
    result: DecodingResult,
    *,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
    on_begin: OnRow = lambda row: None,
) -> DecodingResult:
    """Fill ``result``, which has an open run. Ctrl-C keeps the rows that are done and sets ``interrupted``."""
    config.check()
    rows = [DecodingRow(m, context=T, batch=b, mode=mode, run=result.run) for m, T, b, mode in plan_of(config, result)]
    measure_rows(
        config, result, rows, lambda name: DecodingSubject(config, name, on_work), on_row=on_row, on_begin=on_begin
    )
    return result


def plan_of(config: DecodingConfig, result: DecodingResult) -> list[tuple[str, int, int, str]]:
    """The rows that are still to be measured."""
    wanted = [
        (mechanism, context, batch, mode)
        for mechanism in config.subjects for context in config.ordered_contexts
        for batch in dict.fromkeys(config.batches) for mode in config.modes
    ]  # fmt: skip
    return [key for key in wanted if not result.finished(key)]


class DecodingSubject:
    """The model with one mechanism; its rows share the states after a context, and the exact values."""

    def __init__(self, config: DecodingConfig, mechanism: str, on_work: OnWork) -> None:
        self.config, self.mechanism, self.on_work = config, mechanism, on_work
        self.device = config.torch_device
        text = draw_text(config.size, (max(config.contexts) + CHECKED_TOKENS,), self.device, config.seed)
        model = create_model(config.size, mechanism, self.device, config.seed).to(config.torch_dtype)
        if mechanism == SOFTMAX:
            use_static_cache(model)
        self.model, self.text = model.eval(), text
        quadratic = mechanism_info(variant(mechanism)[0]).cost == "quadratic"
        self.truth = DecodingTruth(self.model, text, EXACT_UP_TO if quadratic and self.device.type == "cuda" else None)
        self.prefix = Prefix(self.model, text, config.piece)

    def fill(self, row: DecodingRow) -> None:
        """Measure a row; problems are noted in it."""
        if row.mode == GRAPH and self.device.type != "cuda":
            row.status, row.reason = "absent", "CUDA graphs need a GPU"
            return
        self._work(row, "reading the context")
        states = self.prefix.reach(row.context)
        row.prefill_seconds = self.prefix.seconds
        row.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        room = max(CHECKED_TOKENS, WARM_STEPS + self.config.steps)
        decoder = Decoder(self.model, states, row.context, row.batch, room, static=row.mode == GRAPH)
        row.state_bytes = state_bytes(decoder.states)
        if not self._ready(row, decoder):
            row.status, row.reason = "absent", "the step cannot be captured as a CUDA graph"
            return
        self._work(row, "checking")
        if not self._right(row, decoder):
            row.wrong()
            return
        self._work(row, "timing")
        decoder.restart()
        samples = [seconds_of(decoder.step, self.device) for _ in range(WARM_STEPS + self.config.steps)]
        timing = Timing.of(samples[WARM_STEPS:])
        row.median_ms, row.p20_ms, row.p80_ms = 1000 * timing.median, 1000 * timing.p20, 1000 * timing.p80
        row.repeats, row.tokens_per_second = timing.repeats, row.batch / timing.median

    def _ready(self, row: DecodingRow, decoder: Decoder) -> bool:
        """Run the step once and measure its memory: what a graph holds is allocated when it is captured."""
        ready: list[bool] = []
        with watch_choices() as choices:
            first = decoder.capture if row.mode == GRAPH else decoder.step
            self._work(row, "a first step")
            decoder.step()  # libraries allocate their workspaces, which are not memory of a step
            decoder.restart()
            heard = len(choices)
            row.peak_bytes = peak_bytes(lambda: ready.append(first() is not False), self.device)
        for choice in choices[:heard]:
            row.explain[str(choice)] = row.explain.get(str(choice), 0) + 1
        if self.mechanism == SOFTMAX:
            row.explain = {"scaled_dot_product_attention over the filled slots of a cache": len(self.model.blocks)}
        return ready[0]

    def _right(self, row: DecodingRow, decoder: Decoder) -> bool:
        decoder.restart()
        count = CHECKED_TOKENS if decoder.steps_that_follow else 1
        found = decoder.read(self.text[row.context : row.context + count])
        verdict = self.truth.check(found, row.context)
        row.error, row.budget, row.worst_tensor = verdict.error, verdict.budget, verdict.worst
        row.checked_against = verdict.against
        return verdict.ok

    def _work(self, row: DecodingRow, what: str) -> None:
        self.on_work(f"{row.mechanism}, context {row.context}, batch {row.batch}, {row.mode}: {what}")
