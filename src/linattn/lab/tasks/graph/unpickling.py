"""Reads pickles of arrays and dicts without running code that they might name.

A pickle may call any function of any module. This reader allows only the names that arrays, sparse matrices and dicts
of lists need; any other name raises before it is looked up.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linattn.support.extras import need

SPARSE_MODULES = ("scipy.sparse.csr", "scipy.sparse._csr")
NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


class SparseRows:
    """A matrix in compressed rows, as scipy pickles it; scipy itself is not needed."""

    data: Any
    indices: Any
    indptr: Any
    _shape: tuple[int, int]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data, self.indices, self.indptr = state["data"], state["indices"], state["indptr"]
        self._shape = tuple(state.get("_shape") or state["shape"])

    def dense(self) -> Any:
        """The matrix as a float32 array."""
        return dense_rows(self.data, self.indices, self.indptr, self._shape)


def dense_rows(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
    """The float32 matrix ``(rows, columns)`` from compressed rows."""
    import numpy

    matrix = numpy.zeros(shape, dtype=numpy.float32)
    matrix[numpy.repeat(numpy.arange(shape[0]), numpy.diff(indptr)), indices] = data
    return matrix


def _reconstruct(cls: type, base: type, state: object) -> object:
    """Rebuild an instance of a class as pickled by Python 2; the only class allowed is a sparse matrix."""
    if cls is not SparseRows:
        raise pickle.UnpicklingError(f"may hold no {cls.__name__}")
    return SparseRows()


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Rebuild bytes that Python 3 pickled in an old protocol."""
    return text.encode("latin1")


def _allowed() -> dict[tuple[str, str], Callable[..., Any]]:
    import numpy
    from numpy._core.multiarray import _reconstruct as array

    found: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): numpy.ndarray,
        ("numpy", "dtype"): numpy.dtype,
        ("collections", "defaultdict"): defaultdict,
        ("_codecs", "encode"): _latin1,
    }
    for builtins, registry in (("builtins", "copyreg"), ("__builtin__", "copy_reg")):  # in Python 3, and in 2
        found |= {(builtins, "object"): object, (builtins, "list"): list}
        found[registry, "_reconstructor"] = _reconstruct
    found |= {(module, "_reconstruct"): array for module in NUMPY_MODULES}
    found |= {(module, "csr_matrix"): SparseRows for module in SPARSE_MODULES}
    return found


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file, encoding="latin1")  # most copies go back to files written by Python 2
        self.path, self.allowed = path, _allowed()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise ValueError(
                f"{self.path} names {module}.{name}, which is no part of an array, a sparse matrix or a dict of lists; "
                "it is not opened"
            ) from None


def read_pickle(path: Path) -> Any:
    """Read a pickle of an array, a :class:`SparseRows`, or a dict of lists."""
    need("reading pickled graphs", "numpy")
    with path.open("rb") as file:
        try:
            return _Reader(file, path).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path} is no pickle of an array, a sparse matrix or a dict, or is damaged") from error
