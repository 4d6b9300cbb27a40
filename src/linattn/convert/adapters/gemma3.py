"""Gemma 3, text models: layers with a sliding window stay as they are, the others are converted."""

from typing import Any, ClassVar

from linattn.convert.adapters.llama import LlamaAdapter


class Gemma3Adapter(LlamaAdapter):
    """As Llama, but with normed queries and keys, another scale, and sliding-window layers among the others."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)

    def why_not(self, module: Any) -> str | None:
        if getattr(module, "attn_logit_softcapping", None) is not None:
            return "its logits are capped by a tanh, which exact attention here does not have"
        return super().why_not(module)


ADAPTERS = (Gemma3Adapter(),)
