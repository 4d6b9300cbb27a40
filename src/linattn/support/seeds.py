"""Seeds that depend only on the place in a run, and not on what was drawn before."""

import random
from hashlib import blake2b

import torch


def mixed_seed(purpose: str, *numbers: int) -> int:
    """A seed of 63 bits that depends on all arguments; other purposes or neighbouring numbers give unrelated seeds."""
    text = f"{purpose} {' '.join(str(int(number)) for number in numbers)}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(purpose: str, *numbers: int) -> torch.Generator:
    """A generator whose draws depend on all arguments; other purposes or numbers give unrelated draws."""
    return torch.Generator().manual_seed(mixed_seed(purpose, *numbers))


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """A generator unchanged; for a number, the stream of that number."""
    return seed if isinstance(seed, torch.Generator) else stream("batch", seed)


def seed_step(seed: int, epoch: int, step: int, rank: int = 0) -> None:
    """Seed torch (CPU and CUDA), numpy and random for one step, from these four numbers alone.

    Draws of a step (mixing, dropped paths) are then the same in a resumed run. Seeding does not wait for the device.
    """
    mixed = mixed_seed("step", seed, epoch, step, rank)
    seed_host(mixed)
    # Not torch.manual_seed: before CUDA is initialised it keeps a stack trace of each call, which takes a hundred times
    # longer than all the rest.
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        torch.cuda.manual_seed_all(mixed)


def seed_host(seed: int) -> None:
    """Seed the CPU generators: torch, numpy where it is installed, and random. Safe in worker processes."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:  # then nothing draws from numpy
        return
    numpy.random.seed(seed % 2**32)
