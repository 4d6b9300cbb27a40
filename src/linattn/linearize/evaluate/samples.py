"""What models write, side by side."""

from collections.abc import Sequence
from typing import Any

import torch

from linattn.linearize.evaluate.quiet import quiet


def samples(model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 60) -> list[str]:
    """What follows each prompt, decoded greedily: the same prompt shows two models' difference and no draw's."""
    found = []
    with quiet(model) as device:
        for prompt in prompts:
            given = tokenizer(prompt, return_tensors="pt")
            ids = given["input_ids"].to(device)
            pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=pad,
            )
            found.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def prompts_of(texts: Sequence[str], count: int, words: int = 24) -> list[str]:
    """The first words of the first texts that are longer than that.

    Example:
        >>> prompts_of(["one two three four", "five"], 2, words=2)
        ['one two']
    """
    return [" ".join(parts[:words]) for text in texts if len(parts := text.split()) > words][:count]
