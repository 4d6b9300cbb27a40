"""Numbered things made ahead of their use, in threads."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

Item = TypeVar("Item")


def ahead(make: Callable[[int], Item], first: int, threads: int) -> Iterator[Item]:
    """``make(first), make(first + 1), ...`` without end, in this order; 0 threads: each when it is asked for.

    Each thread has one more in hand than it is working on. What ``make`` raises is raised at its place. The threads
    end when the iterator is closed.

    Example:
        >>> squares = ahead(lambda n: n * n, 3, threads=2)
        >>> next(squares), next(squares)
        (9, 16)
        >>> squares.close()
    """
    if not threads:
        yield from map(make, count(first))
        return
    yield make(first)  # alone: what is made once for all of them is not to be made by each thread
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
