"""Planetoid's raw files (Cora, Citeseer, PubMed), with the public split."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.unpickling import SparseRows, read_pickle

PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
VALIDATION = 500  # nodes, those after the training nodes, in the public split


def find_planetoid(folder: Path) -> tuple[Path, str] | None:
    """The folder with files ``ind.NAME.*``, which is ``folder`` or ``folder/raw``, and NAME; None if there are none."""
    for place in (folder, folder / "raw"):
        names = sorted(path.name.split(".")[1] for path in place.glob("ind.*.graph"))
        if names:
            return place, names[0]
    return None


def load_planetoid(folder: Path, name: str) -> GraphData:
    """Load ``ind.NAME.{x, y, tx, ty, allx, ally, graph, test.index}`` from ``folder``.

    Nodes are those of ``allx``, then those of ``tx`` at the indices in ``test.index``. Nodes at indices that it skips
    (the isolated nodes of Citeseer) have zero features and class 0, and are in no split. Training nodes are those of
    ``x``, validation nodes the next 500, test nodes those of ``test.index``.
    """
    missing = [part for part in PARTS if not (folder / f"ind.{name}.{part}").is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(f'ind.{name}.{part}' for part in missing)}")
    parts: dict[str, Any] = {part: read_pickle(folder / f"ind.{name}.{part}") for part in PARTS[:-1]}
    places = torch.tensor([int(line) for line in (folder / f"ind.{name}.test.index").read_text().split()])
    before = len(parts["ally"])
    nodes = int(places.max()) + 1
    features, one_hot = _dense(parts["allx"]), _dense(parts["ally"])
    x, y = torch.zeros(nodes, features.shape[1]), torch.zeros(nodes, one_hot.shape[1])
    x[:before], y[:before] = features, one_hot
    x[places], y[places] = _dense(parts["tx"]), _dense(parts["ty"])
    train = len(parts["y"])
    masks = [
        _mask(nodes, chosen)
        for chosen in (torch.arange(train), torch.arange(train, min(train + VALIDATION, before)), places)
    ]
    return GraphData.of_edges(x, _edges(parts["graph"]), y=y.argmax(1), train_mask=masks[0], val_mask=masks[1],
                              test_mask=masks[2], name=name)  # fmt: skip


def _dense(part: Any) -> Tensor:
    return torch.as_tensor(part.dense() if isinstance(part, SparseRows) else part, dtype=torch.float32)


def _edges(neighbours: dict[int, list[int]]) -> Tensor:
    """Edges from ``{node: [neighbours]}``."""
    counts = torch.tensor([len(found) for found in neighbours.values()])
    first = torch.tensor(list(neighbours)).repeat_interleave(counts)
    return torch.stack((first, torch.tensor([node for found in neighbours.values() for node in found])))


def _mask(nodes: int, chosen: Tensor) -> Tensor:
    mask = torch.zeros(nodes, dtype=torch.bool)
    mask[chosen] = True
    return mask
