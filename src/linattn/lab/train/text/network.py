"""Wraps a language model for training: sequences in, sums out."""

from typing import Any

from torch import Tensor, nn

from linattn.lab.tasks.text import Sequences, SequenceTask


class TextNetwork(nn.Module):
    """A model with its task: ``forward`` returns the summed loss of the scored targets and how many of them are hit.

    ``model`` is one of ``linattn.models.language``, with the head that fits the task. Logits are computed only where
    something is scored: for a long sequence with few answers, all logits would cost more than the model.
    """

    dynamic_shapes = None
    """Torch decides which shapes of compiled blocks vary: numbers of documents do, and tests may be longer."""

    def __init__(self, model: Any, task: SequenceTask) -> None:
        super().__init__()
        self.model, self.task = model, task

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the model, which are compiled one by one."""
        layers: nn.ModuleList = self.model.model.layers
        return layers

    def forward(self, batch: Sequences, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Summed loss and hits. ``rows``: indices of the scored targets among all ``B T``; None: all are scored."""
        if self.task.kind == "classification":
            logits, targets = self.logits(batch), batch.targets
            logits = logits.reshape(targets.numel(), -1)
        else:
            hidden, targets = self._hidden(batch).flatten(0, 1), batch.targets
            logits = self.model.lm_head(hidden if rows is None else hidden[rows])
        targets = targets.flatten() if rows is None else targets.flatten()[rows]
        return self.task.training_sums(logits, targets)

    def logits(self, batch: Sequences) -> Tensor:
        """Logits at every place, as ``SequenceTask.score`` needs them."""
        if self.task.kind == "classification":
            found: Tensor = self.model(batch.inputs, attention_mask=batch.key_mask).logits
            return found
        return self.model.lm_head(self._hidden(batch))

    def _hidden(self, batch: Sequences) -> Tensor:
        out = self.model.model(
            batch.inputs, attention_mask=batch.key_mask, cu_seqlens=batch.cu_seqlens, use_cache=False
        )
        hidden: Tensor = out.last_hidden_state
        return hidden
