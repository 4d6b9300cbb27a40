"""Values that are made at first use and kept, safely with several threads."""

from collections.abc import Callable
from functools import cached_property
from threading import RLock
from typing import Any, TypeVar

T = TypeVar("T")


class once(cached_property[T]):  # noqa: N801  used like a keyword, as its parent is
    """``cached_property`` that never makes a value twice, though threads that prepare batches may ask at the same time.

    Once made, the value is an attribute of the instance, and access costs nothing more. Each property has its own lock,
    as making one value may start threads that need another.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        super().__init__(make)
        self.making = RLock()

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        with self.making:
            return super().__get__(instance, owner)
