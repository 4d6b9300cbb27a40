"""What is made at first use and kept, also where several threads ask at once."""

from collections.abc import Callable
from functools import cached_property
from threading import RLock
from typing import Any, TypeVar

T = TypeVar("T")


class once(cached_property[T]):  # noqa: N801  used like a keyword, as its parent is
    """``cached_property`` that never makes a thing twice: threads that prepare batches ask for data at the same time.

    Once it is made it lies in the instance, and neither this class nor its lock is in the way. Each has a lock of its
    own, as the making of one may start threads that need another.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        super().__init__(make)
        self.making = RLock()

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        with self.making:
            return super().__get__(instance, owner)
