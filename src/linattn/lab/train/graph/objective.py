"""What a model learns on a graph: the loss, and scores on the parts of a split."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.features import MOST_DEGREE, MOST_IDENTITY, default_features
from linattn.lab.tasks.graph.links import LabelledPairs, LinkSplit, split_links
from linattn.lab.tasks.graph.splits import per_class_split, stratified_split
from linattn.lab.train.graph.config import GraphConfig
from linattn.lab.train.graph.metrics import accuracy_tensor, average_precision_tensor, binary_f1_tensor, roc_auc_tensor
from linattn.models.graph import Graph, read_graph
from linattn.support.options import OptionError


class Objective(ABC):
    """A task on a graph. Its first score is the one by which epochs and models are judged."""

    metric: str
    data: GraphData
    graph: Graph
    """Data as the model sees it; what is derived from edges and features is computed once for all epochs."""

    @property
    @abstractmethod
    def outputs(self) -> int | None:
        """Number of classes; None if the model chooses the width of its output."""

    @abstractmethod
    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        """Loss on the training part; ``draw``: a CPU generator for what is drawn anew in each epoch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, part: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and scores on ``part``, ``"val"`` or ``"test"``: fp64, left on the device, so that nothing waits."""


class Nodes(Objective):
    """Classification of nodes, with cross-entropy and accuracy, and with two classes also the F1 of the second."""

    metric = "accuracy"

    def __init__(self, data: GraphData) -> None:
        if data.y is None or not data.has_split:
            raise ValueError("classes of nodes need y and the three masks")
        self.data, self.labels, self.graph = data, data.y, read_graph(data)
        masks = {"train": data.train_mask, "val": data.val_mask, "test": data.test_mask}
        self.nodes = {part: mask.nonzero()[:, 0] for part, mask in masks.items() if mask is not None}
        for part, nodes in self.nodes.items():
            if not len(nodes):
                raise ValueError(f"{data.name} has no nodes in its {part} mask")
        self._classes = data.num_classes

    @property
    def outputs(self) -> int:
        return self._classes

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        return self._loss(model(self.graph), "train")

    def evaluate(self, model: nn.Module, part: str) -> tuple[Tensor, dict[str, Tensor]]:
        logits, nodes = model(self.graph), self.nodes[part]
        scores = {"accuracy": accuracy_tensor(logits[nodes], self.labels[nodes])}
        if self._classes == 2:
            scores["binary_f1"] = binary_f1_tensor(logits[nodes], self.labels[nodes])
        return self._loss(logits, part).double(), scores

    def _loss(self, logits: Tensor, part: str) -> Tensor:
        nodes = self.nodes[part]
        return F.cross_entropy(logits[nodes].float(), self.labels[nodes])


class Links(Objective):
    """Link prediction, with binary cross-entropy, area under the ROC curve and average precision."""

    metric = "auc"

    def __init__(self, split: LinkSplit) -> None:
        self.split, self.data, self.graph = split, split.data, read_graph(split.data)
        self.parts = {"val": split.val, "test": split.test}

    @property
    def outputs(self) -> None:
        return None

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        pairs = self.split.training_pairs(draw)
        return self._loss(self._logits(model, pairs), pairs)

    def evaluate(self, model: nn.Module, part: str) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = self.parts[part]
        logits = self._logits(model, pairs)
        scores = {
            "auc": roc_auc_tensor(logits, pairs.edge_label),
            "average_precision": average_precision_tensor(logits, pairs.edge_label),
        }
        return self._loss(logits, pairs).double(), scores

    def _logits(self, model: Any, pairs: LabelledPairs) -> Tensor:
        return model.decode(model.encode(self.graph), pairs.edge_label_index)

    def _loss(self, logits: Tensor, pairs: LabelledPairs) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.float(), pairs.edge_label)


def create_objective(data: GraphData, config: GraphConfig) -> Objective:
    """Split ``data`` as ``config`` says, move it to the device, and prepare its features."""
    of_degrees = config.task == "links" and has_degree_features(data)
    if config.row_normalize or (config.row_normalize is None and bool((data.x >= 0).all())):
        power = 2 if config.row_normalize == "unit" else 1
        data = replace(data, x=F.normalize(data.x, p=power, dim=1))
    if config.task == "links":
        links = split_links(data, config.seed)
        if of_degrees:
            told = default_features(links.data.edge_index, data.num_nodes)
            links = replace(links, data=replace(links.data, x=told))
        return Links(links.to(config.device))
    if data.y is None:
        raise OptionError("data", f"{data.name} has no classes of nodes: use --task links")
    split = config.split if config.split != "auto" else "given" if data.has_split else "stratified"
    if split == "given" and not data.has_split:
        raise OptionError("split", f"{data.name} comes without one: use stratified or per-class")
    if split != "given":
        data = (stratified_split if split == "stratified" else per_class_split)(data, config.seed)
    return Nodes(data.to(config.device))


def has_degree_features(data: GraphData) -> bool:
    """Whether the features are degrees, which readers use if a graph has no features.

    Degrees over all edges would reveal which nodes have links in the validation and test parts.
    """
    if data.num_nodes <= MOST_IDENTITY or data.num_features != MOST_DEGREE + 1:
        return False
    return torch.equal(data.x, default_features(data.edge_index, data.num_nodes).to(data.x))
