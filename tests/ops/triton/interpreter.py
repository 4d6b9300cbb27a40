"""Triton's interpreter without work that it repeats: nearly half of the time of all tests that run in it.

What it computes stays as it is, its own checks included. It reaches into private parts: a release that has others runs
as it comes.
"""

import functools
import inspect
from typing import Any

PARTS = "_patch_lang", "_LangPatchScope", "_get_np_dtype", "GridExecutor", "tl"


def hurry() -> None:
    from triton.runtime import interpreter

    if all(hasattr(interpreter, name) for name in PARTS):
        _prepare_once_per_launch(interpreter)
        _look_up_types_once(interpreter)


def _prepare_once_per_launch(interpreter: Any) -> None:
    """A launch prepares Triton's language for the interpreter; each call of a device function in it did so again."""
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = {id(interpreter.tl), id(interpreter.tl.core)}
    running: list[set[int]] = []  # of each launch that runs: the modules of the language that were prepared

    @functools.cache
    def seen_from(fn: Any) -> set[int]:
        return {id(value) for value in fn.__globals__.values() if inspect.ismodule(value)} & languages

    def prepare_what_is_not(fn: Any) -> Any:
        if running and seen_from(fn) <= running[-1]:
            return interpreter._LangPatchScope()  # nothing to take back
        if running:
            running[-1] |= seen_from(fn)
        return prepare(fn)

    def launch_as_before(self: Any, *args: Any, **options: Any) -> None:
        running.append(set())
        try:
            launch(self, *args, **options)
        finally:
            running.pop()

    interpreter._patch_lang = prepare_what_is_not
    interpreter.GridExecutor.__call__ = launch_as_before


def _look_up_types_once(interpreter: Any) -> None:
    """It fills a table of all types at every look into it."""
    look_up, tl = interpreter._get_np_dtype, interpreter.tl
    known: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return look_up(scalar)
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = look_up_once
