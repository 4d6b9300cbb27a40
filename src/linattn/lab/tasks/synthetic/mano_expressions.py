"""Random expressions of binary operations in prefix notation, and their values: many at once."""

from typing import NamedTuple

import numpy as np

from linattn.lab.tasks.synthetic.ragged import Flags, Ints, below

OPERATIONS = ("+", "-", "*")


class Expressions(NamedTuple):
    """M expressions; number m has ``sizes[m]`` operations and fills the first ``2 sizes[m] + 1`` places.

    Attributes:
        operation: ``(M, 2 L + 1)``, whether a place holds an operation.
        codes: the index in ``OPERATIONS``, or the number.
    """

    sizes: Ints
    operation: Flags
    codes: Ints


def random_expressions(rng: np.random.Generator, sizes: Ints, modulus: int) -> Expressions:
    """Draw expressions. One of l operations is an operation, a left part with ``U{0 .. l - 1}`` of the others, and a
    right part with the rest; one without operations is a number."""
    number, most = len(sizes), int(sizes.max())
    order = np.argsort(-sizes, kind="stable")  # so that expressions that still grow come first
    places = 2 * most + 1
    waiting, top = np.zeros((number, most + 2), np.int64), np.zeros(number, np.int64)
    waiting[:, 0] = sizes[order]
    growing = np.searchsorted(-(2 * sizes[order] + 1), -np.arange(places))
    operation = np.zeros((number, places), np.bool_)
    share = rng.random((places, number))
    every = np.arange(number)
    for place in range(places):
        rows = every[: growing[place]]
        level = top[: growing[place]]
        size = waiting[rows, level]
        inner = size > 0
        left = (share[place, : len(rows)] * size).astype(np.int64)
        waiting[rows, level] = size - 1 - left  # a number pops the stack; what remains there is never read
        waiting[rows, level + 1] = left
        operation[: len(rows), place] = inner
        top[: len(rows)] += 2 * inner - 1
    operation[order] = operation.copy()
    kinds = np.where(operation, len(OPERATIONS), modulus).ravel()
    return Expressions(sizes, operation, below(rng, kinds).reshape(number, places))


def values(expressions: Expressions, modulus: int) -> Ints:
    """The value of each expression, read from its end: numbers go on a stack, an operation takes two from it."""
    number, places = expressions.codes.shape
    order = np.argsort(-expressions.sizes, kind="stable")
    operation, codes = expressions.operation[order], expressions.codes[order]
    reading = np.searchsorted(-(2 * expressions.sizes[order] + 1), -np.arange(places))
    stack, top = np.zeros((number, places // 2 + 3), np.int64), np.zeros(number, np.int64)
    every = np.arange(number)
    for place in reversed(range(places)):
        rows = every[: reading[place]]
        inner, code, level = operation[: len(rows), place], codes[: len(rows), place], top[: len(rows)]
        left, right = stack[rows, level - 1], stack[rows, level - 2]
        result = np.where(code == 0, left + right, np.where(code == 1, left - right, left * right)) % modulus
        stack[rows, level - 2 * inner] = np.where(inner, result, code)
        top[: len(rows)] += 1 - 2 * inner
    found = np.empty(number, np.int64)
    found[order] = stack[:, 0]
    return found
