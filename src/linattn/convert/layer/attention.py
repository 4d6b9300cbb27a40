"""The module that replaces an attention module in a converted model, and what it shows to those that learn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Site
from linattn.convert.layer.core import Core
from linattn.ops.hybrid.decoding import NEWEST_REAL
from linattn.ops.shared.call import check_choice
from linattn.support.offloading import is_offloaded, weights_here

Mode = Literal["student", "teacher", "transfer"]
MODES = ("student", "teacher", "transfer")
# Arguments that say several texts share a row: those of transformers' collators and of this library's models.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "cu_seqlens")


class Observation(NamedTuple):
    """What one layer sees in transfer mode, without gradients.

    q ``(B, H, T, D)`` is scaled so that the model's logits are ``q . k / sqrt(D)``, whatever factor it uses itself; k
    and v are ``(B, H_kv, T, D)``; x ``(B, T, hidden)`` is the layer's input; key_mask is ``(B, T)`` or None; output
    ``(B, H, T, D)`` is the exact softmax attention before the output projection.
    """

    layer_idx: int
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    key_mask: Tensor | None
    output: Tensor


Observer = Callable[[Observation], None]


class ReplacedAttention(nn.Module):
    """An attention module with the old one's projections and attributes, under their names.

    A subclass adds what takes the place of softmax.
    """

    adapter: Adapter

    def __init__(self, old: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        passing = old._non_persistent_buffers_set
        for name, value in adapter.children(old).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=name not in passing)
            else:
                setattr(self, name, value)
        self.adapter, self.training = adapter, old.training


class LinearizedAttention(ReplacedAttention):
    """An attention module whose ``core`` takes the place of softmax; its projections are as they were.

    ``mode`` is ``"student"``, the converted layer; ``"teacher"``, exact softmax as before the conversion; or
    ``"transfer"``, as teacher but without gradients, where ``observe`` is called with an :class:`Observation`.
    """

    def __init__(self, module: nn.Module, core: Core, adapter: Adapter, site: Site) -> None:
        super().__init__(module, adapter)
        self.core, self.shape, self.layer_idx = core.train(module.training), site.shape, site.layer_idx
        self.mode: Mode = "student"
        self.observe: Observer | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode != "transfer"):
            return self._forward(*self.adapter.hidden(args, kwargs))

    def _forward(self, x: Tensor, named: dict[str, Any]) -> Any:
        packed = [name for name in PACKED if named.get(name) is not None]
        if packed:
            raise ValueError(
                f"converted layers do not know packed sequences, and {packed[0]} tells of some: give each text a row "
                "of its own with attention_mask"
            )
        q, k, v = self.adapter.project(self, x, **named)
        factor = self.adapter.scale(self) * self.shape.head_dim**0.5
        q = q if abs(factor - 1) < 1e-9 else q * factor
        key_mask, cache = self.adapter.key_mask(**named), self.adapter.cache(**named)
        if self.mode != "student":
            out = self._teacher(q, k, v, x, key_mask, cache)
        else:
            with weights_here(self.core) if is_offloaded(self.core) else nullcontext():
                out = self._student(q, k, v, x, key_mask, cache)
        return self.adapter.merge(self, out, **named)

    def _student(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, key_mask: Tensor | None, cache: Any) -> Tensor:
        newest_real = getattr(key_mask, NEWEST_REAL, False)
        if key_mask is not None:
            key_mask = key_mask[:, -k.shape[2] :]
        if cache is None:
            return self.core(q, k, v, x=x, key_mask=key_mask)
        from linattn.convert.hf.cache import check_hidden, core_layer

        layer = core_layer(cache, self.layer_idx)
        if key_mask is None and layer.padding is not None:
            check_hidden(cache)
        if k.shape[2] == 1 and (key_mask is None or newest_real):
            out, state = self.core.decode(q, k, v, layer.held, x=x)
        else:
            out, state = self.core.with_state(q, k, v, state=layer.state, x=x, key_mask=key_mask)
        layer.advance(state, k.shape[2])
        if not newest_real:
            layer.note_padding(key_mask)
        return out

    def _teacher(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, key_mask: Tensor | None, cache: Any) -> Tensor:
        own = k, v
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out = exact_attention(q, k, v, key_mask, causal=self.shape.causal)
        if self.mode == "transfer" and self.observe is not None:
            mask = None if key_mask is None else key_mask[:, -own[0].shape[2] :]
            with torch.enable_grad():  # observers may learn from what they see
                self.observe(Observation(self.layer_idx, q, *own, x.detach(), mask, out))
        return out

    def extra_repr(self) -> str:
        shape = ", ".join(f"{name}={value}" for name, value in self.shape._asdict().items())
        return f"layer_idx={self.layer_idx}, mode={self.mode!r}, {shape}"


def exact_attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool) -> Tensor:
    """Softmax attention with the logits ``q . k / sqrt(D)``; the last query belongs to the last key."""
    Tq, Tk = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
    if key_mask is None and (not causal or Tq == Tk or Tq == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and Tq > 1, **options)
    visible = torch.ones(1, 1, Tq, Tk, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(Tk - Tq)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, -Tk:]
    # Softmax over nothing is NaN: a row without visible keys, which only padding has, may see everything.
    visible = visible | ~visible.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, visible, **options)


def linearized_layers(model: nn.Module) -> dict[int, LinearizedAttention]:
    """The converted layers of a model, by their number."""
    found = [module for module in model.modules() if isinstance(module, LinearizedAttention)]
    return {module.layer_idx: module for module in sorted(found, key=lambda module: module.layer_idx)}


def set_mode(model: nn.Module, mode: Mode) -> None:
    """Put all converted layers into ``"student"`` or ``"teacher"`` mode; for ``"transfer"`` use :func:`observing`."""
    check_choice("mode", mode, MODES)
    for layer in linearized_layers(model).values():
        layer.mode = mode


@contextmanager
def observing(model: nn.Module, observe: Observer, mode: Mode = "transfer") -> Iterator[None]:
    """Put all converted layers into ``mode`` with the callback ``observe``; on exit they are as they were.

    Example:
        >>> def show(seen):
        ...     print(seen.layer_idx, seen.q.shape)
        >>> # with observing(model, show): model(ids)
    """
    check_choice("mode", mode, MODES)
    layers = list(linearized_layers(model).values())
    before = [(layer.mode, layer.observe) for layer in layers]
    try:
        for layer in layers:
            layer.mode, layer.observe = mode, observe
        yield
    finally:
        for layer, (own_mode, own_observe) in zip(layers, before, strict=True):
            layer.mode, layer.observe = own_mode, own_observe
