"""Tiny random causal models, converted, in fp64: what differs is wrong, not rounded."""

import torch
from torch.nn.utils.rnn import pad_sequence

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"use_sliding_window": False},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 32,  # not head_dim: the logits have a scale of their own
    },
}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def build(family="Llama", **config):
    """``LlamaForCausalLM`` and its like, in fp64."""
    import transformers

    torch.manual_seed(0)
    kind = "Gemma3Text" if family == "Gemma3" else family
    own = getattr(transformers, f"{kind}Config")(**(SIZES | FAMILIES[family] | config))
    model = getattr(transformers, f"{family}ForCausalLM")(own).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # ones at the start, where a norm forgotten or doubled would not show
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):  # zeros at the start
            parameter.data.normal_(0, 0.3)
    return model


def converted(method, family="Llama", config=(), **options):
    """A tiny model that is converted; the maps are moved away from their starts, which would hide mistakes."""
    from linattn.convert.convert import convert, linearized_layers, plan_model

    model = build(family, **dict(config))
    convert(model, plan_model(model, method, **options))
    model.double()
    for layer in linearized_layers(model).values():
        for parameter in layer.core.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def padded(*lengths):
    """Ids ``(B, T)`` with zeros on the left, and their mask."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 48, (length,), generator=generator) for length in lengths]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    return ids, ids.ne(0).long()


@torch.no_grad()
def logits(model, ids, mask=None, **options):
    """Logits of the real tokens, ``(B, T, vocab)`` with zeros elsewhere."""
    found = model(ids, attention_mask=mask, **options).logits
    return found if mask is None else found * mask.bool()[:, -ids.shape[1] :, None]
