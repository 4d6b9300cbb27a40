"""How a graph model is trained: every choice, checked before any work is done."""

from dataclasses import asdict, dataclass
from typing import Any

from linattn.support.options import OptionError, check_device, check_option

TASKS = ("nodes", "links")
SPLITS = ("auto", "given", "stratified", "per-class")


@dataclass(frozen=True)
class GraphConfig:
    """Adam on the whole graph, one step an epoch; the epoch that counts is chosen on validation data."""

    task: str = "nodes"
    """``"nodes"`` or ``"links"``."""
    epochs: int = 300
    lr: float = 0.01
    weight_decay: float = 5e-4
    """L2, as Adam takes it, of all parameters but those below."""
    attention_weight_decay: float | None = None
    """Of a model's parameters around attention; None: as all."""
    graph_weight_decay: float | None = None
    """Of its parameters that pass messages over edges; None: as all."""
    patience: int = 0
    """Evaluations without a better one after which training stops; 0: never."""
    eval_every: int = 1
    """Epochs between two evaluations on validation data."""
    split: str = "auto"
    """Of nodes: ``"given"`` with the data, ``"stratified"`` (60, 20 and 20 %), ``"per-class"`` (20 of each class, 500
    and 1000); ``"auto"``: given where there is one, else stratified. What is drawn is drawn by the seed."""
    row_normalize: bool | str | None = None
    """True: divide the features of a node by their sum; ``"unit"``: by their length; None: by the sum where none is
    negative."""
    seed: int = 0
    """Of first weights, dropout and what is drawn of a split."""
    device: str = "cpu"

    @property
    def compile(self) -> bool:
        """Never: steps are short and there are few of them."""
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
        """What decides the numbers of a run; where it ran does not."""
        return {name: value for name, value in asdict(self).items() if name != "device"}
