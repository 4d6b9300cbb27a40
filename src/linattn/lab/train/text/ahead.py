"""Makes numbered items ahead of their use, in threads."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

Item = TypeVar("Item")


def ahead(make: Callable[[int], Item], first: int, threads: int) -> Iterator[Item]:
    """``make(first), make(first + 1), ...`` without end, in this order; with 0 threads, each is made when it is needed.

    For each thread, one item waits besides the one it is working on. An error in ``make`` is raised at the place of its
    item. The threads end when the iterator is closed.

    Example:
        >>> squares = ahead(lambda n: n * n, 3, threads=2)
        >>> next(squares), next(squares)
        (9, 16)
        >>> squares.close()
    """
    if not threads:
        yield from map(make, count(first))
        return
    yield make(first)  # first and alone, so that what all items share is made once, and not by each thread
    with ThreadPoolExecutor(threads, "batches") as pool:
        waiting = deque(pool.submit(make, first + 1 + i) for i in range(2 * threads))
        try:
            for number in count(first + 1 + len(waiting)):
                item = waiting.popleft().result()
                waiting.append(pool.submit(make, number))
                yield item
        finally:
            for future in waiting:
                future.cancel()
