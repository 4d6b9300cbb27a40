"""Sizes of language model hosts: functions that return fields of ``LinearAttentionConfig``.

``learned_positions`` stands for ``max_position_embeddings`` equal to the length of the task's sequences.
"""

from collections.abc import Callable
from typing import Any


def pico() -> dict[str, Any]:
    """For tests: it learns a small task in seconds on one core."""
    return {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def mqar(width: int = 64) -> dict[str, Any]:
    """For associative recall, after Zoology: two layers of one head, so that ``width`` alone decides the state.

    Zoology has no feed-forward part; a block of this size has one, as narrow as the model.
    """
    return {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": width}


def lra() -> dict[str, Any]:
    """For the Long Range Arena, as in the PyTorch setting of papers on linear attention: 2 layers of 64 channels.

    Positions are learned vectors. Rotary positions tell how far tokens are apart, but not which is the first; and the
    first token of a nested list decides most about its value.
    """
    return {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "mlp": "gelu",
        "rotary": 0.0,
        "learned_positions": True,
    }


def mad() -> dict[str, Any]:
    """For the MAD suite: two pairs of a mixer and a SwiGLU, 128 channels, without positions."""
    return {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "rotary": 0.0}


def small() -> dict[str, Any]:
    """For bytes of text: 14 M parameters in 8 layers."""
    return {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}


def base() -> dict[str, Any]:
    """12 layers of 768 channels: 85 M parameters without embeddings, as the smallest GPT-2 and BERT."""
    return {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


def m135() -> dict[str, Any]:
    """135 M parameters with 49,152 tokens, in the shape of SmolLM2: deep and narrow, three heads to each of k and v."""
    return {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    }


SIZES: dict[str, Callable[[], dict[str, Any]]] = {
    "pico": pico, "mqar": mqar, "lra": lra, "mad": mad, "small": small, "base": base, "135m": m135,
}  # fmt: skip
