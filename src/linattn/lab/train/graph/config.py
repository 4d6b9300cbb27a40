"""The config of training on graphs."""

from dataclasses import asdict, dataclass
from typing import Any

from linattn.support.options import OptionError, check_device, check_option

TASKS = ("nodes", "links")
SPLITS = ("auto", "given", "stratified", "per-class")


@dataclass(frozen=True)
class GraphConfig:
    """How to train on a graph: Adam on the whole graph, one step per epoch; validation data chooses the best epoch."""

    task: str = "nodes"
    """``"nodes"`` or ``"links"``."""
    epochs: int = 300
    lr: float = 0.01
    weight_decay: float = 5e-4
    """Weight decay (Adam's L2) of all parameters except those of the next two fields."""
    attention_weight_decay: float | None = None
    """Weight decay of a model's parameters around attention; None: ``weight_decay``."""
    graph_weight_decay: float | None = None
    """Weight decay of parameters that pass messages over edges; None: ``weight_decay``."""
    patience: int = 0
    """Number of evaluations without improvement after which training stops; 0: never."""
    eval_every: int = 1
    """Epochs between two evaluations on validation data."""
    split: str = "auto"
    """Split of nodes: ``"given"`` with the data, ``"stratified"`` (60, 20 and 20 %), ``"per-class"`` (20 of each class,
    500 and 1000); ``"auto"``: given if the data has a split, else stratified. Random splits depend on the seed."""
    row_normalize: bool | str | None = None
    """True: divide the features of a node by their sum; ``"unit"``: by their norm; None: by the sum if no feature is
    negative."""
    seed: int = 0
    """Seed of first weights, dropout and random splits."""
    device: str = "cpu"

    @property
    def compile(self) -> bool:
        """Always False: steps are short and few."""
        return False

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        check_option("task", self.task, TASKS)
        check_option("split", self.split, SPLITS)
        if self.row_normalize not in (True, False, None, "unit"):
            raise OptionError("row_normalize", f"must be true, false or unit, got {self.row_normalize}")
        check_device(self.device)
        for option, least in (("epochs", 1), ("eval_every", 1), ("patience", 0)):
            if getattr(self, option) < least:
                raise OptionError(option, f"must be an integer >= {least}, got {getattr(self, option)}")
        if not self.lr > 0:
            raise OptionError("lr", f"must be greater than 0, got {self.lr}")
        for option in ("weight_decay", "attention_weight_decay", "graph_weight_decay"):
            value = getattr(self, option)
            if value is not None and value < 0:
                raise OptionError(option, f"must be at least 0, got {value}")

    def fingerprint(self) -> dict[str, Any]:
        """The fields that decide the results of a run; the device is not one of them."""
        return {name: value for name, value in asdict(self).items() if name != "device"}
