"""A tiny random Llama, and models whose logits are known."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


def tiny_llama(seed=0, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | options)).eval()


class Known(nn.Module):
    """Logits from a function of the ids ``(B, T) -> (B, T, vocabulary)``."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.calls = logits, []
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, ids, logits_to_keep=0, **_):
        self.calls.append(ids.shape)
        return SimpleNamespace(logits=self.logits(ids)[:, -logits_to_keep:])


def next_tokens(right):
    """Logits that name the next token where ``right (B, T)`` says so, and token 0 elsewhere."""

    def logits(ids):
        following = F.pad(ids[:, 1:], (0, 1))
        return 10.0 * F.one_hot(torch.where(right(ids), following, 0), 256).float()

    return logits
