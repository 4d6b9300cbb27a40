"""Base of the converted attention layers of timm models: their own projections around a mechanism of linattn."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linattn.convert.vision.attend import attend, holds_bias
from linattn.convert.vision.planes import Planes
from linattn.layers.plane import mechanism_plane, prefix_option
from linattn.mechanisms.registry import create_mechanism


@dataclass(frozen=True)
class Plan:
    """What a conversion asks for, and where the model's tokens are."""

    mechanism: str
    options: dict[str, Any]
    impl: str = "auto"
    rotary: str = "inputs"
    reduction: str = "keep"
    num_prefix_tokens: int = 0
    planes: Planes = field(default_factory=Planes, compare=False)


class ConvertedAttention(nn.Module):
    """A timm layer with its parameters, under their own names, and ``mechanism`` in place of softmax.

    ``y = proj(mechanism(q, k, v))``, with the layer's own norms of q and k, rotary positions, and norm and gate of the
    output. A subclass defines how q, k and v are computed, and has the ``forward`` of the class it replaces.
    """

    # Parts of the old layer; a class may lack some of them.
    qkv: Any
    q: Any
    kv: Any
    sr: Any
    pool: Any
    act: Any
    norm: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    q_bias: Any
    k_bias: Any
    v_bias: Any
    q_norm: Any
    k_norm: Any
    proj: Any
    proj_drop: Any
    relative_position_bias_table: Any
    relative_position_index: Any

    biases: ClassVar[dict[str, str]] = {}  # of scores: name -> description; only mechanisms with scores keep them

    def __init__(self, old: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.dropped: dict[str, str] = {}
        self.adopt(old)
        self.training = old.training
        self.num_heads = int(old.num_heads)  # type: ignore[arg-type]
        self.head_dim = self.find_head_dim(old)
        self.num_kv_heads = int(getattr(old, "num_kv_heads", self.num_heads))
        self.num_prefix_tokens = int(getattr(old, "num_prefix_tokens", plan.num_prefix_tokens))
        weight = self.proj.weight
        with torch.device(weight.device):
            self.mechanism = create_mechanism(
                plan.mechanism, num_heads=self.num_heads, head_dim=self.head_dim, num_kv_heads=self.num_kv_heads,
                impl=plan.impl, input_dim=self.input_dim,
                **prefix_option(plan.mechanism, self.own_prefix, plan.options),
            ).to(weight.dtype)  # fmt: skip
        self.mechanism.train(self.training)
        if not holds_bias(self.mechanism):
            self._drop_what_scores_held()

    @property
    def own_prefix(self) -> int:
        """Number of tokens before the plane in the input of this layer."""
        return self.num_prefix_tokens

    @property
    @abstractmethod
    def input_dim(self) -> int:
        """Width of x."""

    def adopt(self, old: nn.Module) -> None:
        """Take over parameters, buffers and modules (the same tensors, not copies), and attributes that are None."""
        for name, parameter in old._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in old._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
        for name, module in old._modules.items():
            if name != "mechanism":
                self.add_module(name, module)
        for name, value in vars(old).items():
            if value is None and not name.startswith("_"):
                setattr(self, name, None)

    def find_head_dim(self, old: nn.Module) -> int:
        return int(getattr(old, "head_dim", 0)) or self.proj.weight.shape[1] // self.num_heads

    def drop(self, name: str, why: str) -> None:
        """Remove a part and record why, if the layer has it."""
        part = getattr(self, name, None)
        if part is None:
            return
        if isinstance(part, nn.Module):
            self.dropped |= {f"{name}.{own}": why for own, _ in part.named_parameters()}
        elif isinstance(part, nn.Parameter):
            self.dropped[name] = why
        setattr(self, name, None)

    def _drop_what_scores_held(self) -> None:
        for name, what in self.biases.items():
            self.drop(name, f"{what} is added to scores, and {self.plan.mechanism} has none")
        if (rate := self._drop_rate) > 0:
            self.dropped["attn_drop"] = f"dropout {rate:g} is of weights, and {self.plan.mechanism} never has them"

    @property
    def _drop_rate(self) -> float:
        return float(getattr(getattr(self, "attn_drop", None), "p", 0.0))

    def heads(self, x: Tensor, count: int) -> Tensor:
        """``(B, T, count D)`` to ``(B, count, T, D)``."""
        return x.unflatten(-1, (count, self.head_dim)).transpose(1, 2)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        key_mask: Tensor | None = None,
        rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        spatial_shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """Attention output ``(B, T, H D)``.

        ``rotate`` turns q and k or, with ``rotary="features"``, the features that the mechanism makes of them.
        """
        if rotate is not None and self.plan.rotary == "inputs":
            q, k = rotate(q, k)
            rotate = None
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms and rotations may widen them under autocast
        out = attend(
            self.mechanism, q, k, v, x=x, bias=bias, key_mask=key_mask, rotate=rotate,
            dropout=self._drop_rate if self.training else 0.0,
            spatial_shape=mechanism_plane(self.mechanism, spatial_shape, self.own_prefix),
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        """Apply the layer's own norm and gate of the output, then its projection."""
        norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
        if norm is not None:
            out = norm(out)
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def plane(self, length: int) -> tuple[int, int] | None:
        """The plane of ``length`` tokens, prefix tokens included, for models that do not pass it to their layers."""
        return self.plan.planes.find(length - self.num_prefix_tokens)


def key_mask_of(attn_mask: Tensor | None, is_causal: bool, mechanism: str) -> Tensor | None:
    """The key mask ``(B, T)`` of an attention mask that is the same for every query; others are refused."""
    if is_causal:
        raise ValueError(f"is_causal=True, but the model was converted to {mechanism} as an encoder")
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool and attn_mask.ndim == 4 and attn_mask.shape[1:3] == (1, 1):
        return attn_mask[:, 0, 0]
    raise ValueError(
        f"{mechanism} sees keys or does not: attn_mask must be None or a mask of keys, bool (B, 1, 1, T), "
        f"got {attn_mask.dtype} {tuple(attn_mask.shape)}"
    )
