"""A tiny Llama with grouped heads, batches for it, and a tokenizer of letters."""

import torch

LENGTH = 48
WINDOW = {"window": 8}


def llama(method=None, dtype=torch.float32, num_hidden_layers=2, **options):
    """Converted by ``method``; attention is peaked enough that features have something to learn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from linattn.convert.convert import convert, plan_model

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=num_hidden_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.25,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    if method is not None:
        window = {} if method in ("features", "zeros_softmax") else WINDOW
        convert(model, plan_model(model, method, **(window | options)))
    return model


class Counted:
    """Random tokens by step; counts its calls, and is interrupted when asked for step ``stop``."""

    def __init__(self, rows=2, stop=None):
        self.rows, self.stop, self.asked = rows, stop, []

    def __call__(self, step):
        self.asked.append(step)
        if step == self.stop:
            raise KeyboardInterrupt
        return {"input_ids": torch.randint(32, (self.rows, LENGTH), generator=torch.Generator().manual_seed(step))}


def held_out():
    return [Counted(rows=4)(10**6)]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Letters:
    """Ids 3 ... 28 are letters, 29 is all else."""

    def __init__(self, starts=True, sentences=False):
        self.bos_token_id, self.eos_token_id = (1, 2) if not sentences else (None, None)
        self.cls_token_id, self.sep_token_id = (1, 2) if sentences else (None, None)
        self.pad_token_id, self.starts = 0, starts

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [ord(letter) - ord("a") + 3 if "a" <= letter <= "z" else 29 for letter in text]
        return {"input_ids": [1, *ids] if add_special_tokens and self.starts else ids}
