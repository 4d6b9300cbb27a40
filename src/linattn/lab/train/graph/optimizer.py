"""Adam with a separate weight decay for each part of a model."""

from typing import Any

import torch
from torch import nn

from linattn.lab.train.graph.config import GraphConfig

# Names of modules in each part of a model.
ATTENTION, GRAPH = ("stem", "blocks", "last"), ("convolutions",)


def create_optimizer(model: nn.Module, config: GraphConfig) -> torch.optim.Adam:
    """Adam with three groups of parameters: around attention, passing messages over edges, and all others."""
    groups: list[dict[str, Any]] = []
    decays = {"attention": config.attention_weight_decay, "graph": config.graph_weight_decay, "other": None}
    for name, parameters in parameter_groups(model).items():
        decay = decays[name]
        groups.append({"params": parameters, "weight_decay": config.weight_decay if decay is None else decay})
    return torch.optim.Adam(groups, lr=config.lr)


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The groups ``attention``, ``graph`` and ``other`` that are not empty; each parameter is in one.

    A model may define them by a method of this name. Otherwise, if it has ``blocks`` of attention, they go by the names
    of its modules: ``stem``, ``blocks`` and ``last``, and ``convolutions``. A model without is a single group.
    """
    own = getattr(model, "parameter_groups", None)
    if own is not None:
        found: dict[str, list[nn.Parameter]] = {name: list(parameters) for name, parameters in own().items()}
        taken = {id(parameter) for parameters in found.values() for parameter in parameters}
        found.setdefault("other", []).extend(p for p in model.parameters() if id(p) not in taken)
    else:
        found = {"attention": [], "graph": [], "other": []}
        has_blocks = len(getattr(model, "blocks", ())) > 0
        for name, parameter in model.named_parameters():
            part = name.split(".")[0]
            kind = "attention" if part in ATTENTION else "graph" if part in GRAPH else "other"
            found[kind if has_blocks else "other"].append(parameter)
    return {name: parameters for name, parameters in found.items() if parameters}
