"""Figures of language models: perplexity, memory and speed of decoding, samples; and a quick one for any model."""

from collections.abc import Callable, Iterator, Sequence
from math import exp, sqrt
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from linattn.convert.adapters.families import find_adapter
from linattn.convert.finetune import answer_of
from linattn.convert.training.loop import Batch, call, quiet, shared

ROWS = 2**25  # logits converted to fp32 at once: 128 MiB


Windows = Sequence[tuple[float, int]]
"""``(nats, predicted tokens)`` of each window of a text, in order: two models are compared window by window."""


def perplexity_of(windows: Windows) -> dict[str, Any]:
    """``exp(nats)``, where ``nats`` is the mean loss over all predicted ``tokens`` of all windows."""
    tokens = sum(count for _, count in windows)
    nats = sum(nats for nats, _ in windows) / tokens
    each = [nats / count for nats, count in windows]
    return {
        "perplexity": exp(min(nats, 700.0)),
        "nats": nats,
        "tokens": tokens,
        "windows": each,
    }  # larger ones overflow


def losses_of_windows(
    model: Any, texts: Sequence[Tensor | Sequence[int]], length: int, *, windows: int | None = None, batch_size: int = 1
) -> Windows:
    """Cut each text into windows of ``length`` tokens; each token is predicted from those before it in its window.

    The first token of a window is given, not predicted: nothing comes before it. Windows do not overlap. The last one
    of a text may be shorter, and is left out if it has a single token.

    Args:
        model: from ids ``(B, T)`` to an output with ``logits (B, T, vocabulary)``.
        texts: token ids of each text, ``(n,)``.
        length: tokens of a window, at least 2.
        windows: at most so many windows of each text, from its start; None: all.
        batch_size: windows that the model sees at once; since the model is causal, shorter ones can be padded.
    """
    most = None if windows is None else windows * length
    cut = [part for text in texts for part in torch.as_tensor(text, dtype=torch.long)[:most].split(length)]
    cut = [part for part in cut if len(part) > 1]
    if not cut:
        raise ValueError("texts must hold at least one of two tokens, got none")
    rows: list[tuple[float, int]] = []
    with quiet(model) as device:
        for first in range(0, len(cut), batch_size):
            batch = cut[first : first + batch_size]
            ids, sizes = pad_sequence(batch, batch_first=True).to(device), [len(window) - 1 for window in batch]
            losses = token_losses(model(ids, use_cache=False).logits[:, :-1], ids[:, 1:])
            real = torch.arange(losses.shape[1]) < torch.tensor(sizes)[:, None]
            losses = losses.masked_fill(~real.to(device), 0)
            rows += zip(losses.sum(-1, dtype=torch.float64).tolist(), sizes, strict=True)
    return rows


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of each target, in nats: logits ``(B, T, vocabulary)``, targets ``(B, T)`` -> ``(B, T)`` in fp32.

    Rows are processed in parts: an fp32 copy of all logits of a long window would be the largest tensor of the run.
    """
    rows, wanted = logits.flatten(0, 1), targets.flatten()
    count = max(1, ROWS // rows.shape[-1])
    parts = [
        F.cross_entropy(some.float(), ids, reduction="none")
        for some, ids in zip(rows.split(count), wanted.split(count), strict=True)
    ]
    return torch.cat(parts).view(targets.shape)


def gain(worse: Windows, better: Windows) -> tuple[float, float]:
    """How many nats per token ``better`` is below ``worse``, and the standard error of this gain over windows.

    Both must have seen the same windows: differences within a window vary far less than the windows themselves.

    Example:
        >>> gain([(7.0, 7), (14.0, 7)], [(3.5, 7), (10.5, 7)])
        (0.5, 0.0)
    """
    tokens = [count for _, count in better]
    mean = perplexity_of(worse)["nats"] - perplexity_of(better)["nats"]
    if len(tokens) < 2:
        return mean, float("inf")  # one window says nothing about the spread
    differences = [(a - b) / n for (a, n), (b, _) in zip(worse, better, strict=True)]
    variance = sum(n * (d - mean) ** 2 for n, d in zip(tokens, differences, strict=True)) / sum(tokens)
    return mean, sqrt(variance / (len(differences) - 1))


class Quality:
    """One figure for a model on held-out batches, quick enough to be taken after every stage.

    Perplexity of a causal language model; for other models, the mean cosine of their answers with the teacher's. An
    answer is the mean of the last hidden states over tokens, or the logits of a picture.

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
        if self._teacher is not None:
            return float(F.cosine_similarity(self._answers(model), self._teacher, dim=-1).mean())
        nats, tokens = 0.0, 0
        for batch, output in self._outputs(model):
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            losses = token_losses(output.logits[:, :-1], ids[:, 1:]).double()
            real = torch.ones_like(losses) if mask is None else mask[:, 1:].to(losses)
            nats += float((losses * real).sum())
            tokens += int(real.sum())
        return exp(min(nats / tokens, 700.0))

    def _answers(self, model: nn.Module) -> Tensor:
        answers = []
        for batch, output in self._outputs(model):
            answer, mask = answer_of(output)[0].float(), batch.get("attention_mask")
            if answer.ndim == 3:
                real = answer.new_ones(answer.shape[:2]) if mask is None else mask.to(answer)
                answer = (answer * real[..., None]).sum(1) / real.sum(1, keepdim=True)
            answers.append(answer.cpu())
        return torch.cat(answers)

    def _outputs(self, model: nn.Module) -> Iterator[tuple[Batch, Any]]:
        with quiet(model) as device:
            for batch in self.batches:
                given = shared(batch, device)
                yield given, call(model, given)


def decoding(
    model: Any,
    contexts: Sequence[int],
    *,
    text: Sequence[int] | Tensor,
    steps: int,
    piece: int,
    seconds: float = 120.0,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Read one long sequence in pieces; at each context, stop and decode ``steps`` tokens greedily.

    The tokens that were decoded are part of the next context. Once ``seconds`` have passed, no new context is begun.

    Args:
        model: causal, from ids and ``past_key_values`` to ``logits`` and ``past_key_values``.
        contexts: more than ``steps`` tokens apart.
        text: ids to read, repeated as often as needed.
        steps: at least 2.
        piece: tokens that are read at a time.

    Returns:
        A row for each context: ``cache_bytes``, memory of all tensors in the cache, over all layers;
        ``tokens_per_second``, from the median step without the first.
    """
    given = torch.as_tensor(text, dtype=torch.long)
    rows: list[dict[str, Any]] = []
    begun = perf_counter()
    with quiet(model) as device:
        cache, length = None, 0
        newest = torch.zeros(1, 1, dtype=torch.long, device=device)

        def call(ids: Tensor) -> float:
            """Give the model some tokens; returns the seconds it took."""
            nonlocal cache, length, newest
            begun = _now(device)
            answer = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, newest, length = answer.past_key_values, answer.logits[:, -1:].argmax(-1), length + ids.shape[1]
            return _now(device) - begun

        for context in sorted(set(contexts)):
            if perf_counter() - begun > seconds:
                break
            while length < context:
                places = torch.arange(length, min(length + piece, context)) % len(given)
                call(given[places].to(device)[None])
            cache_bytes = bytes_of(cache)
            times = sorted([call(newest) for _ in range(steps)][1:])
            speed = 1 / times[len(times) // 2]
            rows.append({"context": context, "cache_bytes": cache_bytes, "tokens_per_second": speed})
            if progress is not None:
                progress(rows[-1])
    return rows


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def bytes_of(holder: Any) -> int:
    """Memory of all tensors reachable from an object; views count once, and with all the memory they keep alive.

    Example:
        >>> import torch
        >>> x = torch.zeros(8)
        >>> bytes_of({"a": x, "b": [x[:2], torch.zeros(2, dtype=torch.float64)]})
        48
    """
    storages: dict[int, int] = {}
    seen, left = set[int](), [holder]
    while left:
        part = left.pop()
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif id(part) not in seen and not isinstance(part, type | str | bytes | nn.Module):
            seen.add(id(part))
            inside = part if isinstance(part, dict) else getattr(part, "__dict__", {})
            left += part if isinstance(part, list | tuple | set) else inside.values()
    return sum(storages.values())


def samples(model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 60) -> list[str]:
    """Continue each prompt by greedy decoding, so that only the models differ and not random draws.

    All prompts are decoded in one batch, shorter ones padded on the left: a step takes as long for one as for a few.
    """
    if not prompts:
        return []
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    given = [tokenizer(prompt, return_tensors="pt")["input_ids"][0] for prompt in prompts]
    ids = pad_sequence(given, batch_first=True, padding_value=pad, padding_side="left")
    real = pad_sequence([torch.ones_like(each) for each in given], batch_first=True, padding_side="left")
    with quiet(model) as device:
        made = model.generate(
            ids.to(device), attention_mask=real.to(device), max_new_tokens=max_new_tokens, do_sample=False,
            num_beams=1, pad_token_id=pad,
        )  # fmt: skip
    return [tokenizer.decode(each, skip_special_tokens=True) for each in made[:, ids.shape[1] :]]
