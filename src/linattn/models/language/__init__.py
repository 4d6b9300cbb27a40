"""A language model for every mechanism, in the classes of transformers; needs the extra ``hf``."""

import importlib
from typing import Any

_WHERE = {
    "LinearAttentionConfig": "config",
    "LinearAttentionForCausalLM": "heads",
    "LinearAttentionForMaskedLM": "heads",
    "LinearAttentionForSequenceClassification": "heads",
    "LinearAttentionModel": "model",
    "load_cache": "cache",
    "register_auto_classes": "heads",
    "save_cache": "cache",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """Import transformers when one of the names is first used, and register the classes with its Auto classes."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linattn.support.extras import need

    need("a language model", "transformers", "safetensors")
    importlib.import_module(f"{__name__}.hf.heads").register_auto_classes()
    return getattr(importlib.import_module(f"{__name__}.hf.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
