"""Checks a decoding step: its logits against those of the whole prefix at once, in higher precision.

``err <= 2 (err(plain) + eps)``: plain is the whole prefix at once in the precision that is measured, and errors are
norms of differences over the norm of the exact values, which are in fp64 on a CPU and in fp32 on a GPU.

Softmax in fp32 has no fast kernel, and would take minutes for a long context. Beyond ``EXACT_UP_TO`` tokens its step is
compared to plain itself. If the step is within its budget of the exact values, and plain within its error, the two
differ by no more than the sum; plain's error is that at the longest context with exact values.
"""

from copy import deepcopy

import torch
from torch import Tensor

from linattn.lab.bench.decoding.decoder import any_softmax
from linattn.lab.bench.language.model import TextModel
from linattn.lab.bench.oracle import Verdict

CHECKED_TOKENS = 4
EXACT_UP_TO = 32768


class DecodingTruth:
    """The exact values for one model and text, by context."""

    def __init__(self, model: TextModel, text: Tensor, exact_up_to: int | None) -> None:
        self.model, self.text, self.exact_up_to = model, text, exact_up_to
        self.on_cpu = text.device.type == "cpu"
        self.exact_model = deepcopy(model).to(torch.float64 if self.on_cpu else torch.float32)
        self._plain_error: float | None = None
        self._known: tuple[int, Tensor, float, str] | None = None

    def check(self, found: Tensor, context: int) -> Verdict:
        """Check ``found (B, n, vocabulary)``: logits of the n tokens after the context, in equal sequences."""
        reference, budget, against = self._truth(context)
        errors = distances(found, reference[: found.shape[1]])
        worst = int(errors.nan_to_num(nan=torch.inf).argmax())
        error = errors[worst].item()
        return Verdict(error <= budget, f"logits of sequence {worst}", error, budget, against)

    def _truth(self, context: int) -> tuple[Tensor, float, str]:
        if self._known is None or self._known[0] != context:
            plain = self.logits(self.model, context)
            eps = torch.finfo(self.model.embedding.weight.dtype).eps
            if self.exact_up_to is None or context <= self.exact_up_to or self._plain_error is None:
                exact = self.logits(self.exact_model, context)
                self._plain_error = distances(plain[None], exact).item()
                against = f"{'fp64' if self.on_cpu else 'fp32'}, {context} tokens at once"
                self._known = context, exact, 2 * (self._plain_error + eps), against
            else:
                budget = 2 * (self._plain_error + eps) + self._plain_error
                self._known = context, plain, budget, f"{context} tokens at once in the same precision"
        return self._known[1:]

    @torch.no_grad()
    def logits(self, model: TextModel, context: int) -> Tensor:
        """Logits of the last tokens alone, ``(n, vocabulary)``."""
        with any_softmax():
            x = model.hidden(self.text[None, : context + CHECKED_TOKENS])
        return model.logits(x[0, -CHECKED_TOKENS:])


def distances(found: Tensor, exact: Tensor) -> Tensor:
    """Relative distances of each ``found (B, n, vocabulary)`` from ``exact (n, vocabulary)``."""
    apart = torch.linalg.vector_norm(found.to(exact.dtype) - exact, dim=(1, 2))
    return apart / torch.linalg.vector_norm(exact)
