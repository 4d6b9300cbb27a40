"""Training on one graph: classes of nodes, or links between them."""

from linattn.lab.train.graph.config import GraphConfig
from linattn.lab.train.graph.epochs import GraphRecord
from linattn.lab.train.graph.loop import GraphResult, train_graph
from linattn.lab.train.graph.metrics import accuracy, average_precision, binary_f1, roc_auc
from linattn.lab.train.graph.objective import Links, Nodes, create_objective

__all__ = [
    "GraphConfig",
    "GraphRecord",
    "GraphResult",
    "Links",
    "Nodes",
    "accuracy",
    "average_precision",
    "binary_f1",
    "create_objective",
    "roc_auc",
    "train_graph",
]
