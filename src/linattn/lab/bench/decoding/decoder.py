"""Decodes a batch of sequences token by token, called from Python or as a CUDA graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from linattn.lab.bench.decoding.cache import StaticCache, overwrite, spread
from linattn.lab.bench.kernels.clock import capture
from linattn.lab.bench.language.model import TextModel
from linattn.lab.bench.models.steps import ANY_SOFTMAX
from linattn.models.language.block import BlockState


def any_softmax() -> AbstractContextManager[object]:
    """Allow PyTorch's flash kernel or the next that serves; not cuDNN's, which builds a plan for every new length."""
    return sdpa_kernel(ANY_SOFTMAX, set_priority=True)


class Decoder:
    """A batch of sequences whose step reads one token of each, and updates next tokens, states and position.

    ``prefix``: the states of one sequence, from which every sequence of the batch starts. ``static`` keeps the states
    in the same memory, as a graph needs it. A cache then reads and writes the same slots at every step: the step is
    always the one right after the context.
    """

    def __init__(self, model: TextModel, prefix: list[BlockState], length: int, batch: int, room: int, static: bool):
        self.model, self.prefix, self.length, self.static = model, prefix, length, static
        device = model.embedding.weight.device
        self.states = spread(prefix, batch, room)
        self._start = list(self.states)
        self.position = torch.full((1, 1), length, device=device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.logits = torch.empty(0)
        self._replay: Callable[[], None] | None = None

    def step(self) -> None:
        if self._replay is None:
            self._step()
        else:
            self._replay()

    def restart(self) -> None:
        """Return to the position after the context."""
        self.position.fill_(self.length)
        self.states = list(self._start)
        if self.static and not self._has_cache:
            overwrite(self.states, spread(self.prefix, len(self.tokens), 0))

    def capture(self) -> bool:
        """Turn the step into replays of a CUDA graph; False if it does something that a graph cannot hold."""
        self._replay = capture(self._step)
        return self._replay is not None

    def read(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, n, vocabulary)`` of ``tokens (n,)``, read one by one by every sequence."""
        found = []
        for token in tokens:
            self.tokens.copy_(token)
            self.step()
            found.append(self.logits.clone())
        return torch.stack(found, dim=1)

    @property
    def steps_that_follow(self) -> bool:
        """Whether a step continues the one before it, which those of a graph with a cache do not."""
        return not (self.static and self._has_cache)

    @property
    def _has_cache(self) -> bool:
        return any(isinstance(state.mechanism, StaticCache) for state in self.states)

    @torch.no_grad()
    def _step(self) -> None:
        with any_softmax():
            x, new = self.model.extend(self.tokens, self.states, self.position)
        self.logits = self.model.logits(x[:, -1])
        if self.static:
            overwrite(self.states, new)
        else:
            self.states = new
        self.position += 1
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))
