"""What a model learns on a graph, and how: the config, the loss, and scores on the parts of a split."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.tasks.graph.data import MASKS, GraphData, default_features, has_degree_features
from linattn.lab.tasks.graph.splits import LabelledPairs, LinkSplit, per_class_split, split_links, stratified_split
from linattn.lab.train.graph.metrics import accuracy, average_precision, binary_f1, roc_auc
from linattn.models.graph import read_graph
from linattn.support.config import Config, option
from linattn.support.options import OptionError, check_device

Scores = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class OnGraph(Config):
    """Options that a run and a comparison of runs have in common."""

    task: Literal["nodes", "links"] = option("nodes", "nodes (their classes) or links.", group="Data")
    split: Literal["auto", "given", "stratified", "per-class"] = option(
        "auto", "How nodes are split: given with the data; stratified, 60, 20 and 20 % of each class; per-class, 20 of "
        "each class, 500 and 1000.", group="Data", default_text="given, else stratified",
    )  # fmt: skip
    patience: int = option(
        0, "Evaluations without a better one before a run stops; 0: never.", least=0, group="Training"
    )
    eval_every: int = option(1, "Epochs between evaluations.", least=1, group="Training")


@dataclass(frozen=True, kw_only=True)
class GraphConfig(OnGraph):
    """How to train on a graph: Adam on the whole graph, one step an epoch; validation data chooses the best epoch."""

    epochs: int = option(300, "Steps over the whole graph.", least=1)
    lr: float = option(0.01, "Learning rate.", above=0)
    weight_decay: float = option(5e-4, "Adam's L2 of all parameters but those of the next two.", least=0)
    attention_weight_decay: float | None = option(None, "That around attention.", least=0, default_text="weight_decay")
    graph_weight_decay: float | None = option(None, "That of convolutions.", least=0, default_text="weight_decay")
    row_normalize: bool | str | None = option(
        None, "Divide the features of a node by their sum, or unit: by their norm.", choices=(True, False, "unit"),
        default_text="by the sum if no feature is negative",
    )  # fmt: skip
    seed: int = option(0, "Seed of first weights, dropout and random splits.")
    device: str = option("cpu", "cpu, cuda or cuda:N.")

    def check(self) -> None:
        check_device(self.device)


class Objective(Protocol):
    """A task on a graph.

    ``metric`` is the score by which epochs and models are judged, ``outputs`` the number of classes, or None if a model
    chooses the width of its output. ``loss`` is that of the training part; ``draw`` is a CPU generator for what is
    drawn anew in each epoch. ``evaluate`` has the loss and the scores on ``part``, ``"val"`` or ``"test"``: fp64, left
    on the device, so that nothing waits.
    """

    metric: str
    outputs: int | None

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor: ...

    def evaluate(self, model: nn.Module, part: str) -> tuple[Tensor, Scores]: ...


class Nodes:
    """Classification of nodes, with cross-entropy and accuracy, and with two classes also the F1 of the second."""

    metric = "accuracy"

    def __init__(self, data: GraphData) -> None:
        if data.y is None or not data.has_split:
            raise ValueError("classes of nodes need y and the three masks")
        self.data, self.labels, self.graph = data, data.y, read_graph(data)
        self.outputs: int | None = data.num_classes
        self.nodes = {name.removesuffix("_mask"): getattr(data, name).nonzero()[:, 0] for name in MASKS}
        for part, nodes in self.nodes.items():
            if not len(nodes):
                raise ValueError(f"{data.name} has no nodes in its {part} mask")

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        return self._loss(model(self.graph), "train")

    def evaluate(self, model: nn.Module, part: str) -> tuple[Tensor, Scores]:
        logits, nodes = model(self.graph), self.nodes[part]
        scores = {"accuracy": accuracy(logits[nodes], self.labels[nodes])}
        if self.outputs == 2:
            scores["binary_f1"] = binary_f1(logits[nodes], self.labels[nodes])
        return self._loss(logits, part).double(), scores

    def _loss(self, logits: Tensor, part: str) -> Tensor:
        nodes = self.nodes[part]
        return F.cross_entropy(logits[nodes].float(), self.labels[nodes])


class Links:
    """Link prediction, with binary cross-entropy, area under the ROC curve and average precision."""

    metric = "auc"

    def __init__(self, split: LinkSplit) -> None:
        self.split, self.data, self.graph = split, split.data, read_graph(split.data)
        self.outputs: int | None = None

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        return self._evaluate(model, self.split.training_pairs(draw))[0]

    def evaluate(self, model: nn.Module, part: str) -> tuple[Tensor, Scores]:
        pairs: LabelledPairs = getattr(self.split, part)
        loss, logits = self._evaluate(model, pairs)
        labels = pairs.edge_label
        return loss.double(), {"auc": roc_auc(logits, labels), "average_precision": average_precision(logits, labels)}

    def _evaluate(self, model: Any, pairs: LabelledPairs) -> tuple[Tensor, Tensor]:
        logits = model.decode(model.encode(self.graph), pairs.edge_label_index)
        return F.binary_cross_entropy_with_logits(logits.float(), pairs.edge_label), logits


def create_objective(data: GraphData, config: GraphConfig) -> Nodes | Links:
    """Split ``data`` as ``config`` says, move it to the device, and prepare its features."""
    of_degrees = has_degree_features(data)
    if config.row_normalize or (config.row_normalize is None and bool((data.x >= 0).all())):
        data = replace(data, x=F.normalize(data.x, p=2 if config.row_normalize == "unit" else 1, dim=1))
    if config.task == "links":
        links = split_links(data, config.seed)
        if of_degrees:  # over all edges they would reveal which nodes have links in the validation and test parts
            x = default_features(links.data.edge_index, data.num_nodes)
            links = replace(links, data=replace(links.data, x=x))
        return Links(links.to(config.device))
    if data.y is None:
        raise OptionError("data", f"{data.name} has no classes of nodes: use --task links")
    split = config.split if config.split != "auto" else "given" if data.has_split else "stratified"
    if split == "given" and not data.has_split:
        raise OptionError("split", f"{data.name} comes without one: use stratified or per-class")
    if split != "given":
        data = (stratified_split if split == "stratified" else per_class_split)(data, config.seed)
    return Nodes(data.to(config.device))
