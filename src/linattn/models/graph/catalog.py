"""All graph models by name."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from linattn.models.graph.convolution import GraphConvolutionalNetwork, SimpleGraphConvolution
from linattn.models.graph.flat import FlatGraphTransformer
from linattn.models.graph.model import GraphModel
from linattn.models.graph.pseudo_riemannian import HYPERBOLIC, PseudoRiemannianGraphTransformer
from linattn.ops.shared.call import check_choice


@dataclass(frozen=True)
class GraphModelInfo:
    """What a name stands for: a class, its paper, and the options that make it that paper's model."""

    cls: type[GraphModel]
    paper: str
    year: int
    takes_mechanism: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # defaults that differ from those of the class
    fixed: dict[str, Any] = field(default_factory=dict)  # what makes it this model, and cannot be changed


_MODELS = {
    "pseudo_riemannian": GraphModelInfo(
        PseudoRiemannianGraphTransformer, "openreview bChA28jPpm", 2025, takes_mechanism=True
    ),
    "hypformer": GraphModelInfo(
        PseudoRiemannianGraphTransformer, "arXiv:2407.01290", 2024, takes_mechanism=True,
        options={"mechanism": "focused", "activation": "relu"},
        # Its value path adds to the attention's output, which is then no centroid.
        fixed={"signature": HYPERBOLIC, "residual": "midpoint", "merge": "midpoint", "value_path": True,
               "centroid": False},
    ),
    "euclidean": GraphModelInfo(
        FlatGraphTransformer, "arXiv:2006.16236", 2020, takes_mechanism=True, fixed={"block": "mechanism"}
    ),
    "sgformer": GraphModelInfo(FlatGraphTransformer, "arXiv:2306.10759", 2023, fixed={"block": "sgformer"}),
    "difformer": GraphModelInfo(
        FlatGraphTransformer, "arXiv:2301.09474", 2023,
        options={"num_layers": 2, "graph_layers": 0}, fixed={"block": "difformer"},
    ),
    "polynormer": GraphModelInfo(FlatGraphTransformer, "arXiv:2403.01232", 2024, fixed={"block": "polynormer"}),
    "gcn": GraphModelInfo(GraphConvolutionalNetwork, "arXiv:1609.02907", 2016),
    "sgc": GraphModelInfo(SimpleGraphConvolution, "arXiv:1902.07153", 2019),
}  # fmt: skip


def graph_models() -> list[str]:
    """Names of all graph models, for :func:`create_graph_model`."""
    return sorted(_MODELS)


def graph_model_info(name: str) -> GraphModelInfo:
    check_choice("name", name, graph_models())
    return _MODELS[name]


def graph_model_options(name: str) -> dict[str, Any]:
    """The options of a model and their defaults, without the arguments of :func:`create_graph_model`."""
    info = graph_model_info(name)
    parameters = list(inspect.signature(info.cls.__init__).parameters.values())[1:]
    own = {"in_channels", "hidden", "out_channels", "task", "mechanism", *info.fixed}
    return {p.name: info.options.get(p.name, p.default) for p in parameters if p.name not in own}


def create_graph_model(
    name: str, *, in_channels: int, hidden: int, out_channels: int | None = None, mechanism: str | None = None,
    task: str = "nodes", **options: Any,
) -> GraphModel:  # fmt: skip
    """Build a graph model by name.

    Args:
        name: one of :func:`graph_models`.
        in_channels: width of the node features.
        hidden: width inside the model; on the pseudo-hyperboloid its dimension q + p.
        out_channels: number of classes; for links the width (on the pseudo-hyperboloid, the dimension) of the
            embeddings, None: ``hidden``.
        mechanism: name of a bidirectional mechanism; None: the model's own. Models without attention, or whose
            attention is part of their definition, accept only None.
        task: ``"nodes"`` or ``"links"``.
        options: the model's own options, see :func:`graph_model_options`.

    Example:
        >>> import torch
        >>> from linattn.models.graph import Graph, create_graph_model
        >>> model = create_graph_model("gcn", in_channels=8, hidden=16, out_channels=3)
        >>> ring = torch.arange(5)
        >>> model(Graph(torch.randn(5, 8), torch.stack([ring, ring.roll(1)]))).shape
        torch.Size([5, 3])
    """
    info = graph_model_info(name)
    if out_channels is None and task == "nodes":
        raise ValueError("out_channels must be given for task='nodes': it is the number of classes")
    out_channels = hidden if out_channels is None else out_channels
    for label, value in (("in_channels", in_channels), ("hidden", hidden), ("out_channels", out_channels)):
        if not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{label} must be an integer >= 1, got {value!r}")
    allowed = graph_model_options(name)
    for option in options:
        if option not in allowed:
            raise TypeError(f"graph model {name!r} has no option {option!r}; it takes {', '.join(allowed)}")
    options = info.options | options | info.fixed
    if mechanism is not None:
        if not info.takes_mechanism:
            raise ValueError(f"graph model {name!r} has no exchangeable attention: mechanism must be None")
        options["mechanism"] = mechanism
    build: Callable[..., GraphModel] = info.cls
    return build(in_channels, hidden, out_channels, task=task, **options)
