"""Settings of a decoding benchmark, checked before any work is done."""

from dataclasses import dataclass

from linattn.lab.bench.language.settings import LanguageConfig, check_numbers
from linattn.support.options import OptionError, check_option

EAGER, GRAPH = "eager", "cuda-graph"
MODES = (EAGER, GRAPH)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
QUICK_CONTEXTS = (24, 48, 96)


@dataclass(frozen=True)
class DecodingConfig(LanguageConfig):
    """One run."""

    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = (1, 16)
    modes: tuple[str, ...] = MODES
    steps: int = 16  # timed steps
    piece: int = 8192  # tokens of a context read at a time

    def check(self) -> None:
        super().check()
        self.needs_state()
        check_numbers("contexts", self.contexts)
        check_numbers("batch", self.batches)
        if not self.modes:
            raise OptionError("modes", f"name at least one of {', '.join(MODES)}")
        for mode in self.modes:
            check_option("modes", mode, MODES)
        for option in ("steps", "piece"):
            if getattr(self, option) < 1:
                raise OptionError(option, f"must be an integer >= 1, got {getattr(self, option)}")

    @property
    def ordered_contexts(self) -> list[int]:
        """Contexts in rising order, as each continues the one before it."""
        return sorted(set(self.contexts))
