"""Training on graphs: the config, what a model learns on nodes or links, its scores, and the loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.tasks.graph.data import MASKS, GraphData, default_features, has_degree_features
from linattn.lab.tasks.graph.splits import LabelledPairs, LinkSplit, per_class_split, split_links, stratified_split
from linattn.models.graph import read_graph
from linattn.support.config import Config, option
from linattn.support.files import write_atomically
from linattn.support.options import OptionError, check_device

# Names of modules around attention, and of those that pass messages over edges, where a model has both.
BRANCHES = {**dict.fromkeys(("stem", "blocks", "last"), "attention"), "convolutions": "graph"}
Record = dict[str, Any]
Scores = dict[str, float]


class NotFiniteError(RuntimeError):
    """The training loss is not finite."""


@dataclass(frozen=True, kw_only=True)
class OnGraph(Config):
    """Options that a run and a comparison of runs have in common."""

    task: Literal["nodes", "links"] = option("nodes", "nodes (their classes) or links.", group="Data")
    split: Literal["auto", "given", "stratified", "per-class"] = option(
        "auto",
        "How nodes are split: given with the data; stratified, 60, 20 and 20 % of each class; per-class, 20 of "
        "each class, 500 and 1000.",
        group="Data",
        default_text="given, else stratified",
    )
    patience: int = option(
        0, "Evaluations without a better one before a run stops; 0: never.", least=0, group="Training"
    )
    eval_every: int = option(1, "Epochs between evaluations.", least=1, group="Training")


@dataclass(frozen=True, kw_only=True)
class GraphConfig(OnGraph):
    """How to train on a graph: Adam on the whole graph, one step an epoch; validation data chooses the best epoch.

    Weight decays of the parts around attention and of convolutions are ``weight_decay`` if None. ``row_normalize``:
    divide the features of a node by their sum, or ``"unit"``: by their norm; None: by the sum if none is negative.
    """

    epochs: int = option(300, least=1)
    lr: float = option(0.01, above=0)
    weight_decay: float = option(5e-4, least=0)
    attention_weight_decay: float | None = option(None, least=0)
    graph_weight_decay: float | None = option(None, least=0)
    row_normalize: bool | str | None = option(None, choices=(True, False, "unit"))
    seed: int = 0
    device: str = "cpu"

    def check(self) -> None:
        check_device(self.device)


class Objective:
    """A task on a graph: its loss, and scores in percent, fp64, of which the first judges epochs and models.

    ``outputs`` is the number of classes, or None if a model chooses the width of its output.
    """

    outputs: int | None = None

    def __init__(self, data: GraphData, scores: Mapping[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        self.data, self.graph, self.scores = data, read_graph(data), scores

    @property
    def metric(self) -> str:
        return next(iter(self.scores))

    def results(self, model: Any, part: str, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, logits and labels on ``part``; ``draw`` is a CPU generator for what is drawn anew in each epoch."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, part: str) -> tuple[float, Scores]:
        """The loss and the scores on ``part``, ``"val"`` or ``"test"``."""
        loss, logits, labels = self.results(model, part, torch.Generator())
        return float(loss), {name: float(score(logits, labels)) for name, score in self.scores.items()}


class Nodes(Objective):
    """Classification of nodes, with cross-entropy and accuracy, and with two classes also the F1 of the second."""

    def __init__(self, data: GraphData) -> None:
        if data.y is None or not data.has_split:
            raise ValueError("classes of nodes need y and the three masks")
        super().__init__(data, {"accuracy": accuracy, **({"binary_f1": binary_f1} if data.num_classes == 2 else {})})
        self.labels, self.outputs = data.y, data.num_classes
        self.nodes = {name.removesuffix("_mask"): getattr(data, name).nonzero()[:, 0] for name in MASKS}
        for part, nodes in self.nodes.items():
            if not len(nodes):
                raise ValueError(f"{data.name} has no nodes in its {part} mask")

    def results(self, model: Any, part: str, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        logits, labels = model(self.graph)[self.nodes[part]], self.labels[self.nodes[part]]
        return F.cross_entropy(logits.float(), labels), logits, labels


class Links(Objective):
    """Link prediction, with binary cross-entropy, area under the ROC curve and average precision."""

    def __init__(self, split: LinkSplit) -> None:
        super().__init__(split.data, {"auc": roc_auc, "average_precision": average_precision})
        self.split = split

    def results(self, model: Any, part: str, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        pairs: LabelledPairs = self.split.training_pairs(draw) if part == "train" else getattr(self.split, part)
        logits = model.decode(model.encode(self.graph), pairs.edge_label_index)
        return F.binary_cross_entropy_with_logits(logits.float(), pairs.edge_label), logits, pairs.edge_label


def create_objective(data: GraphData, config: GraphConfig) -> Objective:
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


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Percent of the rows of ``logits (N, classes)`` whose largest entry is at ``labels (N,)``: micro-F1."""
    return 100 * (logits.argmax(1) == labels).double().mean()


def binary_f1(logits: Tensor, labels: Tensor) -> Tensor:
    """F1 of class 1, ``2 TP / (2 TP + FP + FN)``, of ``logits (N, 2)`` and ``labels (N,)``; 0 for 0 / 0."""
    predicted, true = logits.argmax(1) == 1, labels == 1
    both = predicted.double().sum() + true.double().sum()  # 2 TP + FP + FN
    return 200 * (predicted & true).double().sum() / both.clamp(min=1)


def roc_auc(scores: Tensor, labels: Tensor) -> Tensor:
    """Percent of pairs (edge, no edge) in which the edge has the higher score; equal scores count half.

    Computed from the ranks of ``scores (P,)``; ``labels (P,)`` are 1 for an edge and 0 for none. NaN if all are equal.
    """
    values, positive = scores.detach().double(), labels.double()
    ordered = values.sort().values
    below, up_to = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    rank = (below + up_to + 1) / 2  # from 1; equal scores share the mean of their ranks
    ones = positive.sum()
    return 100 * ((rank * positive).sum() - ones * (ones + 1) / 2) / (ones * (len(values) - ones))


def average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Precision wherever recall grows, weighted by the growth: the mean over edges of the precision among scores as
    high; equal scores are one step.
    """
    values, positive = scores.detach().double(), labels.double()
    ordered, order = values.sort()
    below = torch.searchsorted(ordered, values)
    lower = positive[order].cumsum(0) - positive[order]  # number of edges before each place
    precision = (positive.sum() - lower[below]) / (len(values) - below)
    return 100 * (precision * positive).sum() / positive.sum()


def train_graph(
    create_model: Callable[[], nn.Module],
    objective: Objective,
    config: GraphConfig,
    folder: Path | None = None,
    *,
    test: bool = True,
    on_record: Callable[[Record], None] = lambda record: None,
) -> dict[str, Any]:
    """Train, choose the best epoch on validation data, and test it once, if ``test``.

    The epoch with the best validation score wins; among equals, the one with the lower validation loss, then the first.
    The result has the ``epoch`` (counted from 1), the score ``val`` on validation data and on test data ``scores``, of
    which ``score`` is the first, all in percent; ``seconds``, ``parameters``, and ``records``: all evaluations.

    Args:
        create_model: called after the seed is set, which thus decides the first weights.
        objective: data and task, on ``config.device``.
        config: how to train.
        folder: for ``weights.pt`` of the best epoch; None: no files.
        on_record: called with each evaluation.
    """
    device = torch.device(config.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = create_model().to(device)
        begin = perf_counter()
        records, best = run_epochs(model, objective, config, on_record)
        result = {"epoch": best["round"], "val": best["score"], "score": best["score"],
                  "seconds": perf_counter() - begin,
                  "parameters": sum(parameter.numel() for parameter in model.parameters())}  # fmt: skip
        model.eval()
        if test:
            with torch.no_grad():
                scores = objective.evaluate(model, "test")[1]
            result |= {"score": scores[objective.metric], "scores": scores}
    if folder is not None:
        kept = {name: value.cpu() for name, value in model.state_dict().items()}
        write_atomically(folder / "weights.pt", lambda temporary: torch.save(kept, temporary))
    return result | {"records": records}


def run_epochs(
    model: nn.Module, objective: Objective, config: GraphConfig, on_record: Callable[[Record], None]
) -> tuple[list[Record], Record]:
    """Train. Returns all evaluations, and the best, whose weights the model has then."""
    optimizer, draw = create_optimizer(model, config), torch.Generator().manual_seed(config.seed)
    records: list[Record] = []
    best: Record = {}
    weights: dict[str, Tensor] = {}
    waited = 0
    for epoch in range(1, config.epochs + 1):
        model.train()
        loss, *_ = objective.results(model, "train", draw)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if epoch % config.eval_every and epoch < config.epochs:
            continue
        model.eval()
        with torch.no_grad():
            val_loss, scores = objective.evaluate(model, "val")
        if not isfinite(loss.item()):
            raise NotFiniteError(f"the training loss is not finite: epoch {epoch}, lr {config.lr:g}; a lower lr helps")
        record = {"round": epoch, "train_loss": loss.item(), "val_loss": val_loss, "score": scores[objective.metric]}
        records.append(record)
        on_record(record)
        waited += 1
        if not best or (record["score"], -val_loss) > (best["score"], -best["val_loss"]):
            best, waited = record, 0
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if config.patience and waited >= config.patience:
            break
    model.load_state_dict(weights)
    return records, best


def create_optimizer(model: nn.Module, config: GraphConfig) -> torch.optim.Adam:
    """Adam with a weight decay for each branch of a model with attention, and one for all other parameters."""
    decays = {"attention": config.attention_weight_decay, "graph": config.graph_weight_decay, "other": None}
    groups: dict[str, list[nn.Parameter]] = {branch: [] for branch in decays}
    branches = BRANCHES if len(getattr(model, "blocks", ())) else {}
    for name, parameter in model.named_parameters():
        groups[branches.get(name.split(".")[0], "other")].append(parameter)
    return torch.optim.Adam(
        [
            {"params": params, "weight_decay": config.weight_decay if (own := decays[b]) is None else own}
            for b, params in groups.items()
            if params
        ],
        lr=config.lr,
    )
