"""Folds reflections into projections, which makes a trained mirror as cheap as plain ReLU features."""

import torch
from torch import Tensor, nn

from linattn.convert.vision.base import ConvertedAttention
from linattn.convert.vision.tokens import RotaryAttention
from linattn.layers.attention import Attention
from linattn.mechanisms.mirror import Mirror


def fold_reflections(model: nn.Module) -> list[str]:
    """Merge the fixed reflections of every mirror into its layer's projections, in place; returns the layers' names.

    ``W_q <- H W_q``, ``b_q <- H b_q``, and the same for k. Outputs do not change. Needs ``modulation="none"``:
    otherwise reflections depend on the input, and this raises an error, as it does if anything stands between
    projection and mechanism. If it raises, nothing was changed.

    Example:
        >>> from linattn.models.vision import create_pyramid, fold_reflections
        >>> options = {"mirror": {"modulation": "none"}}
        >>> model = create_pyramid("mirror", "xt", depths=(1, 1, 1, 1), mechanism_options=options)
        >>> fold_reflections(model)
        ['stages.0.blocks.0.attn', 'stages.1.blocks.0.attn']
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Attention | ConvertedAttention)
        and isinstance(layer.mechanism, Mirror)
        and layer.mechanism.angles.shape[0]  # not folded before
    }
    if not layers:
        raise ValueError("nothing to fold: the model has no mirror with reflections left in it")
    for name, layer in layers.items():
        _check(name, layer)
    for layer in layers.values():
        if isinstance(layer, Attention):
            layer.fold()
        else:
            _fold(layer)
    return list(layers)


def _check(name: str, layer: Attention | ConvertedAttention) -> None:
    assert isinstance(layer.mechanism, Mirror)
    layer.mechanism.reflection_matrix()  # raises with the reason if no matrix stands for the reflection
    if isinstance(layer, Attention):
        between = "qk_norm" if layer.options.qk_norm is not None else ""
    else:
        norm = getattr(layer, "q_norm", None)
        between = "a norm of q and k" if norm is not None and not isinstance(norm, nn.Identity) else ""
        if isinstance(layer, RotaryAttention):
            between = "a rotation by position"
    if between:
        raise ValueError(f"{between} stands between the projections of {name} and its reflection")


@torch.no_grad()
def _fold(layer: ConvertedAttention) -> None:
    mirror = layer.mechanism
    assert isinstance(mirror, Mirror)
    for_q, for_k = mirror.reflection_matrix(), mirror.reflection_matrix(keys=True)
    n = for_q.shape[0]
    if getattr(layer, "qkv", None) is not None:
        places = [(layer.qkv, slice(0, n), for_q), (layer.qkv, slice(n, 2 * n), for_k)]
    elif getattr(layer, "kv", None) is not None:
        places = [(layer.q, slice(0, n), for_q), (layer.kv, slice(0, n), for_k)]
    else:
        places = [(layer.q_proj, slice(0, n), for_q), (layer.k_proj, slice(0, for_k.shape[0]), for_k)]
    for linear, rows, matrix in places:
        assert isinstance(linear, nn.Linear)
        for own in (linear.weight, linear.bias):
            if own is not None:
                own[rows] = _reflected(matrix, own[rows])
    for name, matrix in (("q_bias", for_q), ("k_bias", for_k)):
        bias = getattr(layer, name, None)
        if bias is not None:
            bias.copy_(_reflected(matrix, bias))
    layer.mechanism = mirror.without_reflection()


def _reflected(matrix: Tensor, rows: Tensor) -> Tensor:
    """Reflect in fp64: the result is kept for good, so it is rounded only once."""
    return (matrix.double() @ rows.double()).to(rows)
