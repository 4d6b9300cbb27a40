"""Memory and speed of decoding, by the number of tokens that came before, and texts that a model writes."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.convert.evaluate.quiet import quiet


def decoding(
    model: Any,
    contexts: Sequence[int],
    *,
    text: Sequence[int] | Tensor | None = None,
    batch: int = 1,
    steps: int = 16,
    piece: int = 1024,
    seconds: float = float("inf"),
    seed: int = 0,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Read one long sequence in pieces; at each context, stop and decode ``steps`` tokens greedily.

    The tokens that were decoded are part of the next context. Once ``seconds`` have passed, no new context is begun.

    Args:
        model: causal, from ids and ``past_key_values`` to ``logits`` and ``past_key_values``.
        text: ids to read, repeated as often as needed; None: random ids, drawn with ``seed``.
        piece: tokens that are read at a time.

    Returns:
        A row for each context: ``cache_bytes``, memory of all tensors in the cache, over all layers and sequences;
        ``tokens_per_second`` over all sequences, from the median step without the first; ``read_seconds``, the time to
        read from the first token up to this context, without the timed steps.
    """
    if steps < 2:
        raise ValueError(f"steps must be an integer >= 2, the first is not counted, got {steps}")
    if text is None:
        text = torch.randint(model.config.vocab_size, (4096,), generator=torch.Generator().manual_seed(seed))
    given = torch.as_tensor(text, dtype=torch.long)
    rows: list[dict[str, Any]] = []
    begun = perf_counter()
    with quiet(model) as device:
        cache, length, read_seconds = None, 0, 0.0
        newest = torch.zeros(batch, 1, dtype=torch.long, device=device)

        def call(ids: Tensor) -> float:
            """Give the model some tokens; returns the seconds it took."""
            nonlocal cache, length, newest
            begun = _now(device)
            answer = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, newest, length = answer.past_key_values, answer.logits[:, -1:].argmax(-1), length + ids.shape[1]
            return _now(device) - begun

        for context in sorted(set(contexts)):
            if context < length + 1:
                raise ValueError(f"contexts must be more than {steps} tokens apart, got {list(contexts)}")
            if perf_counter() - begun > seconds:
                break
            while length < context:
                places = torch.arange(length, min(length + piece, context)) % len(given)
                read_seconds += call(given[places].to(device).expand(batch, -1))
            cache_bytes = bytes_of(cache)
            times = [call(newest) for _ in range(steps)][1:]
            speed = batch / sorted(times)[len(times) // 2]
            rows.append({"context": context, "batch": batch, "cache_bytes": cache_bytes, "tokens_per_second": speed,
                         "read_seconds": read_seconds})  # fmt: skip
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
    seen: set[int] = set()
    left = [holder]
    while left:
        part = left.pop()
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif id(part) not in seen and not isinstance(part, type | str | bytes | torch.nn.Module):
            seen.add(id(part))
            if isinstance(part, dict):
                left += part.values()
            elif isinstance(part, list | tuple | set):
                left += part
            elif hasattr(part, "__dict__"):
                left += vars(part).values()
    return sum(storages.values())


def samples(model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 60) -> list[str]:
    """Continue each prompt by greedy decoding, so that only the models differ and not random draws.

    All prompts are decoded in one batch, shorter ones padded on the left: a step takes as long for one as for a few.
    """
    if not prompts:
        return []
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    given = [tokenizer(prompt, return_tensors="pt")["input_ids"][0] for prompt in prompts]
    longest = max(map(len, given))
    ids = torch.stack([F.pad(each, (longest - len(each), 0), value=pad) for each in given])
    real = torch.stack([torch.arange(longest) >= longest - len(each) for each in given])
    with quiet(model) as device:
        made = model.generate(
            ids.to(device), attention_mask=real.long().to(device), max_new_tokens=max_new_tokens, do_sample=False,
            num_beams=1, pad_token_id=pad,
        )  # fmt: skip
    return [tokenizer.decode(each, skip_special_tokens=True) for each in made[:, longest:]]


def prompts_of(texts: Sequence[str], count: int, words: int = 24) -> list[str]:
    """The first words of the first texts that have more words than that.

    Example:
        >>> prompts_of(["one two three four", "five"], 2, words=2)
        ['one two']
    """
    return [" ".join(parts[:words]) for text in texts if len(parts := text.split()) > words][:count]
