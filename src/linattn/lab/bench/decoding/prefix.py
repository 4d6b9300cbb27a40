"""The states of one sequence after a context, computed once for all batch sizes and modes."""

import time

import torch
from torch import Tensor

from linattn.lab.bench.decoding.cache import empty_states
from linattn.lab.bench.decoding.decoder import any_softmax
from linattn.lab.bench.language.model import TextModel
from linattn.models.language.block import BlockState


class Prefix:
    """Reads ``text (tokens,)`` in pieces, from context to context; never computes logits."""

    def __init__(self, model: TextModel, text: Tensor, piece: int) -> None:
        self.model, self.text, self.piece = model, text, piece
        self.length, self.seconds = 0, 0.0
        self._states: list[BlockState] | None = None

    @torch.no_grad()
    def reach(self, context: int) -> list[BlockState]:
        """States after the first ``context`` tokens; ``seconds`` is the time since the context before this one."""
        if context < self.length:
            self.length, self._states = 0, None
        begin, device = time.perf_counter(), self.text.device
        while self.length < context:
            states = self._states or empty_states(self.model, 1, len(self.text))
            end = min(self.length + self.piece, context)
            positions = torch.arange(self.length, end, device=device).unsqueeze(0)
            with any_softmax():
                _, self._states = self.model.extend(self.text[None, self.length : end], states, positions)
            self.length = end
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds = time.perf_counter() - begin
        assert self._states is not None
        return self._states
