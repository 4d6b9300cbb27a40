"""Triton's interpreter without work that it repeats: much of the time of all tests that run in it.

What it computes stays as it is, its own checks included. It reaches into private parts: a release that has others runs
as it comes.
"""

import functools
import inspect
from typing import Any

PARTS = "_patch_lang", "_LangPatchScope", "_get_np_dtype", "GridExecutor", "tl"
STEPS = "broadcast_impl_value", "binary_op_sanitize_overflow_impl"


def hurry() -> None:
    from triton.runtime import interpreter

    semantic = getattr(interpreter, "interpreter_semantic", None)
    if all(hasattr(interpreter, name) for name in PARTS) and all(hasattr(semantic, name) for name in STEPS):
        _prepare_once_per_launch(interpreter)
        _look_up_types_once(interpreter)
        _describe_shapes_once(interpreter.tl.core)
        _leave_equal_shapes_alone(semantic)
        _look_for_overflow_where_it_is_told(semantic)


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


def _describe_shapes_once(core: Any) -> None:
    """Every value has a type of its own, with its shape checked, named and wrapped anew: few differ."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if type(size) is core.constexpr else size for size in shape]
        key = (type(element_ty), element_ty.name, *sizes)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    def make_value_once(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_value(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core.block_type.__init__ = make_type_once
    core.tensor.__init__ = make_value_once


def _leave_equal_shapes_alone(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_what_differs(left: Any, right: Any) -> tuple[Any, Any]:
        return (left, right) if left.shape is right.shape else broadcast(left, right)  # a shape is described once

    semantic.broadcast_impl_value = broadcast_what_differs


def _look_for_overflow_where_it_is_told(semantic: Any) -> None:
    """Sums and products of integers are made again in 64 bits for an assertion that only debugging holds."""
    look = semantic.binary_op_sanitize_overflow_impl

    def look_where_it_is_told(*args: Any) -> None:
        if semantic.builder.options.debug:
            look(*args)

    semantic.binary_op_sanitize_overflow_impl = look_where_it_is_told
