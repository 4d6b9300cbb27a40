"""A language model small enough for every mechanism, in fp64: what differs is wrong, not rounded."""

import torch

VOCABULARY = 40
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}  # fp64, two layers deep, in two orders of summation


def options(**changes):
    own = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.3}  # fmt: skip
    grouped = changes.get("mechanism") not in ("mirror",)  # a reflection across heads needs as many of each
    return own | ({} if grouped else {"num_key_value_heads": 4}) | changes


def build(head="ForCausalLM", seed=0, **changes):
    """A model whose outputs differ from token to token: weights of deviation 0.3 are large for 32 channels."""
    from linattn.models import language

    torch.manual_seed(seed)
    model = getattr(language, f"LinearAttention{head}")(language.LinearAttentionConfig(**options(**changes)))
    return model.double().eval()


def draw(batch=2, length=11, seed=1):
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows, length):
    """Rows of any length as one batch, zeros on the left, and its mask."""
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return ids, mask


def greedy(model, ids, new, mask=None):
    """Greedy decoding without a cache: all of the text again for every token."""
    for _ in range(new):
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids
