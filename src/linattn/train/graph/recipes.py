"""Settings of papers, by model, data set and task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from linattn.models.graph import graph_models
from linattn.support.options import check_option


@dataclass(frozen=True)
class Recipe:
    """``hidden`` and ``options`` of the model, ``train`` as fields of ``GraphConfig``."""

    hidden: int
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)


# Without a line for its data, a model has these. "unit": rows of length 1, for which one learning rate and one weight
# decay suit bags of words, counts and weighted words alike.
DEFAULTS = {
    "pseudo_riemannian": Recipe(
        64,
        {"input_map": "normalized", "input_hops": 2, "input_norm": "bounded", "graph_layers": 1, "norm": False,
         "merge": "midpoint", "residual": "midpoint", "dropout": 0.5, "input_dropout": 0.8},
        {"lr": 0.003, "weight_decay": 0.02, "row_normalize": "unit"},
    ),
    "hypformer": Recipe(64, {"graph_layers": 3}, {"lr": 0.005, "weight_decay": 5e-3}),
    "euclidean": Recipe(64, {}, {"lr": 0.01}),
    "sgformer": Recipe(
        64, {"graph_layers": 2}, {"lr": 0.01, "weight_decay": 5e-3, "row_normalize": "unit"}
    ),
    "difformer": Recipe(64, {}, {"lr": 0.001, "weight_decay": 0.01}),
    "polynormer": Recipe(64, {}, {"lr": 0.001}),
    "gcn": Recipe(64, {}, {"lr": 0.01, "weight_decay": 5e-4}),
    "sgc": Recipe(64, {}, {"lr": 0.2, "weight_decay": 5e-5}),
}  # fmt: skip

# Of links: distances are judged by a fixed radius, and rows divided by their sum leave all nodes within it. On Cora a
# GCN has an area under the curve of 59 % with these and of 88 % with rows of length 1 (one seed, 60 epochs).
_LINKS = {"row_normalize": "unit"}
_LINK_RATES = {"sgc": 0.01}

# Halves of time and space. Other signatures of 64 dimensions were not compared under equal settings.
_HALVES = {"signature": (32, 32)}


def _curved(
    signature: tuple[int, int], layers: int, graph_layers: int, lr: float, decay: float = 0.1, **options: Any
) -> Recipe:
    """The pseudo-Riemannian transformer of dimension 16; the last weight decay is half of the others for classes of
    nodes and five times that for links."""
    rest = decay / 2 if decay == 0.1 else 5 * decay
    # Decays of this size go with features as they are: with rows divided by their sum, Cora's are learned worse.
    train = {"lr": lr, "weight_decay": rest, "attention_weight_decay": decay, "graph_weight_decay": decay,
             "row_normalize": False}  # fmt: skip
    shape = {"signature": signature, "num_layers": layers, "graph_layers": graph_layers, "input_map": "convolution"}
    return Recipe(16, shape | options, train)


# As the paper's scripts have them; (q, p) is also what the space search finds on the citation graphs and the tree.
# Dropout of the features is not theirs: on Cora it lifts validation accuracy from 81.4 to 83.3 % (3 seeds, 80 epochs).
# For classes of nodes they are not the default: the scripts choose epochs by test data, and on Citeseer, chosen by
# validation data, they stay below a GCN (one seed, 100 of their 1000 epochs).
PAPER = {
    ("pseudo_riemannian", "nodes", "cora"): _curved((14, 2), 3, 3, 0.005, input_dropout=0.5),
    ("pseudo_riemannian", "nodes", "citeseer"): _curved((8, 8), 3, 2, 0.002, norm=False, input_dropout=0.5),
    ("pseudo_riemannian", "nodes", "pubmed"): _curved(
        (14, 2), 2, 4, 0.01, dropout=(0.3, 0.0), graph_dropout=(0.4, 0.0), residual=None
    ),
    ("pseudo_riemannian", "links", "cora"): _curved((14, 2), 1, 1, 0.005, 1e-3),
    ("pseudo_riemannian", "links", "citeseer"): _curved((8, 8), 2, 2, 0.005, 1e-3),
    ("pseudo_riemannian", "links", "pubmed"): _curved((14, 2), 1, 1, 0.005, 1e-3),
    ("pseudo_riemannian", "links", "tree-4-6"): _curved((0, 16), 1, 1, 0.01, 1e-3, graph_weight=0.9, dropout=0.0),
}


def graph_recipe(model: str, task: str, data: str, *, paper: bool = False) -> Recipe:
    """What was found best on validation data, else the model's default.

    Of links, and with ``paper``, what the paper's scripts have for the data set called ``data``, where they have it.
    """
    check_option("models", model, graph_models())
    key = (model, task, data.lower())
    if key in PAPER and (paper or task == "links"):
        return PAPER[key]
    found = DEFAULTS[model]
    if task == "links":
        rate = {"lr": _LINK_RATES.get(model, found.train["lr"])}
        return Recipe(found.hidden, found.options, {**found.train, **_LINKS, **rate})
    if key in PAPER:  # a citation graph
        return Recipe(found.hidden, {**found.options, **_HALVES}, found.train)
    return found
