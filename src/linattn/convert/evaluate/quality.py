"""One figure for a model's quality on held-out batches, quick enough to be taken after every stage."""

from collections.abc import Sequence
from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.convert.adapters import find_adapter
from linattn.convert.evaluate.perplexity import token_losses
from linattn.convert.evaluate.quiet import quiet
from linattn.convert.training.loop import Batch, call, shared
from linattn.convert.training.losses import answer_of


class Quality:
    """Perplexity of a causal language model; for other models, the mean cosine of their answers with the teacher's.

    An answer is the mean of the last hidden states over tokens, or the logits of a picture.

    Args:
        model: the teacher, before it is converted.
        batches: held-out batches, the same for all stages.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.batches = batches
        heads = getattr(model, "get_output_embeddings", lambda: None)()
        causal = all(site.shape.causal for site in find_adapter(model).sites(model))
        self.metric = "perplexity" if causal and heads is not None else "cosine"
        self._teacher = None if self.metric == "perplexity" else self._answers(model)

    def of(self, model: nn.Module) -> float:
        if self._teacher is None:
            return self._perplexity(model)
        return float(F.cosine_similarity(self._answers(model), self._teacher, dim=-1).mean())

    def _perplexity(self, model: nn.Module) -> float:
        nats, tokens = 0.0, 0
        with quiet(model) as device:
            for batch in self.batches:
                batch = shared(batch, device, None)
                ids, mask = batch["input_ids"], batch.get("attention_mask")
                losses = token_losses(call(model, batch).logits[:, :-1], ids[:, 1:]).double()
                real = torch.ones_like(losses) if mask is None else mask[:, 1:].to(losses)
                nats += float((losses * real).sum())
                tokens += int(real.sum())
        return exp(min(nats / tokens, 700.0))

    def _answers(self, model: nn.Module) -> Tensor:
        answers = []
        with quiet(model) as device:
            for batch in self.batches:
                batch = shared(batch, device, None)
                answer, _ = answer_of(call(model, batch))
                answer = answer.float()
                mask = batch.get("attention_mask")
                if answer.ndim == 3:
                    real = answer.new_ones(answer.shape[:2]) if mask is None else mask.to(answer)
                    answer = (answer * real[..., None]).sum(1) / real.sum(1, keepdim=True)
                answers.append(answer.cpu())
        return torch.cat(answers)
