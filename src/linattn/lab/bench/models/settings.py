"""Settings of a race of models, checked before any work is done."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from linattn.lab.bench.kernels.rivals import versions
from linattn.lab.bench.models.cases import SOFTMAX, VARIANTS, ModelCase, select, variant
from linattn.lab.bench.models.steps import COMPILED, EAGER_GRAPH, GRAPH, MODES
from linattn.mechanisms.registry import list_mechanisms
from linattn.support import machine
from linattn.support.options import OptionError, check_device, check_option
from linattn.support.source import source_digest

BACKENDS = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class ModelsConfig:
    """Settings of one run. ``quick`` shrinks every model, so that all of it also runs on a CPU."""

    device: str = "cuda"
    cases: tuple[str, ...] = ()  # none: all
    mechanisms: tuple[str, ...] = ()  # none: those of each case; softmax is always included
    modes: tuple[str, ...] = (COMPILED, GRAPH)
    backend: str = "inductor"
    quick: bool = False
    seconds: float = 540.0  # after this nothing new is begun
    milliseconds: float = 500.0  # of measured steps per row
    processes: int = 0  # that compile and check eager steps beforehand; 0: the race does it itself
    seed: int = 0

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        check_device(self.device)
        select(self.cases)
        allowed = [*list_mechanisms(), *VARIANTS]
        for name in self.mechanisms:
            check_option("mechanisms", name, allowed)
        if not self.modes:
            raise OptionError("modes", f"name at least one of {', '.join(MODES)}")
        for mode in self.modes:
            check_option("modes", mode, MODES)
        check_option("backend", self.backend, BACKENDS)
        for option in ("seconds", "milliseconds"):
            if not getattr(self, option) > 0:
                raise OptionError(option, f"must be greater than 0, got {getattr(self, option)}")
        if self.processes < 0:
            raise OptionError("processes", f"must be an integer >= 0, got {self.processes}")
        if self.torch_device.type == "cpu" and not self.quick:
            raise OptionError("device", "models are timed on a GPU; on a CPU use --quick, which shows that it runs")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def autocast(self) -> bool:
        """Whether to run bf16 around fp32 weights, as models are trained on a GPU."""
        return self.torch_device.type == "cuda"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is used; kernels are compiled in any case."""
        return any(mode != EAGER_GRAPH for mode in self.modes)

    def selected(self) -> list[ModelCase]:
        return [case.quick() if self.quick else case for case in select(self.cases)]

    def mechanisms_of(self, case: ModelCase) -> list[str]:
        """Softmax first, then those of the mechanisms asked for that can serve the case."""
        causal = case.kind == "language"
        able = list_mechanisms(causal=True) if causal else list_mechanisms(bidirectional=True)
        asked = [name for name in self.mechanisms if variant(name)[0] in able] or case.mechanisms
        return list(dict.fromkeys((SOFTMAX, *asked)))

    def describe(self, command: list[str] | None = None) -> dict[str, Any]:
        """The ``meta`` of a result."""
        meta = machine.describe_run(self.torch_device, command)
        meta["versions"] |= {"triton": versions()["triton"]}
        precision = "bf16 autocast, fp32 weights" if self.autocast else "fp32"
        return meta | {"seed": self.seed, "settings": asdict(self), "precision": precision, "source": source_digest()}
