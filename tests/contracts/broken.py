"""Mechanisms that are wrong in one way each, and the contract that must notice."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import Call, LinearMechanism, MechanismOutput
from linattn.ops.linear.api import linear_attention_with_state
from linattn.ops.shared.types import LinearState


class Sound(LinearMechanism):
    """A user's own mechanism with nothing wrong: positive features with a learned slope."""

    def __init__(self, num_heads: int, head_dim: int, **common: Any) -> None:
        super().__init__(num_heads, head_dim, **common)
        self.slope = nn.Parameter(torch.ones(head_dim))

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return {"q": F.softplus(q * self.slope), "k": F.softplus(k * self.slope), "v": v}

    @property
    def num_features(self) -> int:
        return self.head_dim


class SoundWithInput(Sound):
    """The same with a decay from x."""

    def __init__(self, num_heads: int, head_dim: int, **common: Any) -> None:
        super().__init__(num_heads, head_dim, **common)
        self.gate = nn.Linear(self.input_dim, self.num_kv_heads)

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        log_decay = F.logsigmoid(self.gate(self.input_of(x, k))).transpose(1, 2)
        return super().arguments(q, k, v, x=x) | {"log_decay": log_decay}


class FormsDiffer(Sound):
    """One form has another eps."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return super().arguments(q, k, v, x=x) | {"eps": 1e-5 if self.impl == "chunked" else 1e-6}


class LeaksOneToken(Sound):
    """Each token sees the value of the next."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        return super().attend(q, k, torch.cat([v[:, :, 1:], v[:, :, -1:]], dim=2), call)


class GlobalMaximum(Sound):
    """Exponential keys, kept small by the largest of the whole sequence: a big future empties the past."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        k = k * self.slope
        return {"q": F.softplus(q), "k": (k - k.amax(dim=2, keepdim=True).detach()).exp(), "v": v}


class MasksOnlyValues(Sound):
    """Padding is taken out of the numerator and stays in the denominator."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if call.key_mask is not None:
            v = v.masked_fill(~call.key_mask[:, None, :, None], 0)
        return super().attend(q, k, v, replace(call, key_mask=None))


class DecaysOnPadding(Sound):
    """Masked tokens add nothing, but the state fades while they pass."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        arguments = self.arguments(q, k, v, x=None) | {"log_decay": q.new_full((self.num_kv_heads,), -0.1)}
        if call.key_mask is not None:
            arguments["k"] = arguments["k"].masked_fill(~call.key_mask[:, None, :, None], 0)
        return self.linear(replace(call, key_mask=None), arguments)


class ForgetsKeySum(Sound):
    """The next piece starts with the values of the last one, but without its weights."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if isinstance(call.state, LinearState):
            call = replace(call, state=LinearState(call.state.kv, torch.zeros_like(call.state.k)))
        return super().attend(q, k, v, call)


class CutsStateGradient(Sound):
    """Right values, but no gradient goes back through the state."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if isinstance(call.state, LinearState):
            call = replace(call, state=LinearState(call.state.kv.detach(), call.state.k.detach()))
        return super().attend(q, k, v, call)


class ComputesInBfloat16(Sound):
    """fp32 in, fp32 out, bf16 between."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        out = super().attend(q, k, v, call)
        return MechanismOutput(out.output.bfloat16().to(out.output.dtype), out.state)


class RoundsOneForm(Sound):
    """The fast form alone rounds its keys."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        arguments = super().arguments(q, k, v, x=x)
        if self.impl == "chunked" and k.dtype == torch.float32:
            arguments["k"] = arguments["k"].bfloat16().to(k.dtype)
        return arguments


class DetachesParameter(Sound):
    """The slope is used, but never learns."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        slope = self.slope.detach()
        return {"q": F.softplus(q * slope), "k": F.softplus(k * slope), "v": v}


class NormAtZero(Sound):
    """Unit keys by a norm whose gradient at a zero vector is not finite."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return super().arguments(q, k / (k.square().sum(-1, keepdim=True).sqrt() + 1e-6), v, x=x)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class WrongGradient(Sound):
    """A backward pass of its own that halves the gradient of k."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return super().arguments(q, _HalfGradient.apply(k), v, x=x)


class AsksForNumbers(Sound):
    """Looks at a value on the way, which breaks the graph."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        return super().attend(q if q.abs().max().item() < 1e9 else q / 2, k, v, call)


class LeavesRowUnwritten(Sound):
    """The first token of the output is whatever was in memory."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        out = super().attend(q, k, v, call)
        output = torch.empty_like(out.output)
        output[:, :, 1:] = out.output[:, :, 1:]
        return MechanismOutput(output, out.state)


class GrowingState(Sound):
    """Remembers every key and value, and says that it does not."""

    state_type = tuple

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if not call.need_state:
            return super().attend(q, k, v, call)
        old_k, old_v = (k[:, :, :0], v[:, :, :0]) if call.state is None else call.state
        before = linear_attention_with_state(
            old_k, F.softplus(old_k * self.slope), old_v, causal=True, impl="reference"
        ).state
        output = super().attend(q, k, v, replace(call, state=before)).output
        return MechanismOutput(output, (torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)))


class MakesSquareMatrix(Sound):
    """Declares linear cost and fills a T x T matrix."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        scores = q @ q.transpose(-1, -2)
        return super().attend(q + 0 * scores.mean(), k, v, call)


class NoLengthCheck(Sound):
    """Answers for a length of -1."""

    def state_size(self, length: int) -> int:
        return self.num_kv_heads * self.num_features * (self.head_dim + 1)


class TooModest(Sound):
    """Has a state; the test declares that it has none."""
