"""Gradients of results that no loss used: PyTorch gives None, kernels read zeros."""

from torch import Tensor


def or_zeros(gradient: Tensor | None, like: Tensor, width: int | None = None) -> Tensor:
    """The gradient, or one zero expanded to the shape of ``like``, with the last dimension ``width`` if given."""
    if gradient is not None:
        return gradient
    return like.new_zeros(()).expand(like.shape if width is None else (*like.shape[:-1], width))


def whole_state(d_kv: Tensor | None, d_z: Tensor | None, V: int) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of a state, with zeros for a part that was not used; None if neither part was used."""
    if d_kv is None and d_z is not None:
        d_kv = d_z.new_zeros(*d_z.shape, V)
    if d_z is None and d_kv is not None:
        d_z = d_kv.new_zeros(d_kv.shape[:3])
    return d_kv, d_z
