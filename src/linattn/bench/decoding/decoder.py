"""A batch of sequences that is decoded token by token, as Python calls it or as a CUDA graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from linattn.bench.decoding.cache import StaticCache, overwrite, spread
from linattn.bench.kernels.clock import capture
from linattn.bench.language.model import TextModel
from linattn.bench.models.steps import ANY_SOFTMAX
from linattn.models.language.tokens import BlockState


def any_softmax() -> AbstractContextManager[object]:
    """PyTorch's flash kernel, or the next that serves; not cuDNN's, which builds a plan for every new length."""
    return sdpa_kernel(ANY_SOFTMAX, set_priority=True)


class Decoder:
    """A step reads a token for each sequence and leaves the likeliest next ones, the states and the position behind it.

    ``prefix``: the states of one sequence, which every sequence of the batch starts from. ``static`` keeps the states
    in the same memory, as a graph needs it. A cache then writes and sees the same slots at every step, those of the
    context: the step behind exactly that context, again and again.
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
        """Back behind the context."""
        self.position.fill_(self.length)
        self.states = list(self._start)
        if self.static and not self._has_cache:
            overwrite(self.states, spread(self.prefix, len(self.tokens), 0))

    def capture(self) -> bool:
        """Make the step replays of a graph; False if it does what a graph cannot hold."""
        self._replay = capture(self._step)
        return self._replay is not None

    def read(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, n, vocabulary)`` of ``tokens (n,)``, given one by one to every sequence."""
        found = []
        for token in tokens:
            self.tokens.copy_(token)
            self.step()
            found.append(self.logits.clone())
        return torch.stack(found, dim=1)

    @property
    def steps_that_follow(self) -> bool:
        """Whether one step continues another: not those of a graph with a cache."""
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
