"""Progress bars of transformers, switched off."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_bars(*, warnings: bool = True) -> Iterator[None]:
    """Silence transformers' bars for every file, which would break into a command's output, and maybe its warnings."""
    from transformers.utils import logging

    shown, before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not warnings:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()
