"""Texts that models write, for a comparison side by side."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from linattn.convert.evaluate.quiet import quiet


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
            ids.to(device),
            attention_mask=real.long().to(device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
        )
    return [tokenizer.decode(each, skip_special_tokens=True) for each in made[:, longest:]]


def prompts_of(texts: Sequence[str], count: int, words: int = 24) -> list[str]:
    """The first words of the first texts that have more words than that.

    Example:
        >>> prompts_of(["one two three four", "five"], 2, words=2)
        ['one two']
    """
    return [" ".join(parts[:words]) for text in texts if len(parts := text.split()) > words][:count]
