"""Planetoid's raw files as Python 2 wrote them, by hand: a small graph with a gap among its test nodes."""

import pickle
from collections import defaultdict
from pathlib import Path

import numpy as np

FEATURES, CLASSES = 5, 3


class Opcodes:
    """A pickle of protocol 2 that names scipy's class without importing scipy, with Python 2's names."""

    @staticmethod
    def sparse(matrix: np.ndarray) -> bytes:
        rows, columns = matrix.nonzero()
        state = {
            "data": matrix[rows, columns].astype(np.float32),
            "indices": columns.astype(np.int32),
            "indptr": np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int32),
            "_shape": matrix.shape,
        }
        body = pickle.dumps(state, protocol=2)[2:-1]  # without the opcodes of begin and end
        return b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81" + body + b"b."

    @staticmethod
    def neighbours(graph: dict[int, list[int]]) -> bytes:
        found = defaultdict(list, graph)
        return pickle.dumps(found, protocol=2, fix_imports=True)


def write_planetoid(folder: Path, name: str = "tiny") -> dict[str, np.ndarray]:
    """13 nodes: 3 to train, 7 others before the test nodes, which are 12 and 10; 11 is not there. Returns the truth."""
    draw = np.random.default_rng(0)
    x = np.round(draw.random((13, FEATURES)) * (draw.random((13, FEATURES)) < 0.6), 3).astype(np.float32)
    y = draw.integers(0, CLASSES, 13)
    x[11], y[11] = 0, 0
    one_hot = np.eye(CLASSES, dtype=np.int32)[y]
    places = np.array([12, 10])  # in the order of tx, not sorted
    parts = {"x": (slice(0, 3), "y"), "allx": (slice(0, 10), "ally"), "tx": (places, "ty")}
    folder.mkdir(parents=True, exist_ok=True)
    for features, (chosen, labels) in parts.items():
        (folder / f"ind.{name}.{features}").write_bytes(Opcodes.sparse(x[chosen]))
        (folder / f"ind.{name}.{labels}").write_bytes(pickle.dumps(one_hot[chosen], protocol=2))
    # A repeat (0-1 twice), a loop (3-3) and an edge that is written in one direction only (4-12).
    graph = {0: [1, 1, 2], 1: [0], 2: [0, 5], 3: [3, 10], 4: [12], 5: [2], 10: [3], 12: []}
    (folder / f"ind.{name}.graph").write_bytes(Opcodes.neighbours(graph))
    (folder / f"ind.{name}.test.index").write_text("12\n10\n")
    return {"x": x, "y": y, "pairs": np.array([[0, 0, 2, 3, 4], [1, 2, 5, 10, 12]])}
