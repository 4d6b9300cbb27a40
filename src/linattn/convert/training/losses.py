"""Losses of a student against its teacher: of a layer's output, of its rows of weights, of the model's answer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from linattn.convert.layer.attention import Observation
from linattn.ops.shared.call import compute_dtype

IGNORED = -100
MOST_LOGITS = 2**27  # logits converted to fp32 at once: 512 MiB


def output_error(core: nn.Module, seen: Observation) -> tuple[Tensor, Tensor]:
    """``sum |student - teacher|^2`` and ``sum |teacher|^2`` of one layer's heads over real tokens, ``(B,)`` each."""
    student = _wide(core(seen.q, seen.k, seen.v, x=seen.x, key_mask=seen.key_mask))
    teacher = _wide(seen.output)
    difference = student - teacher
    if seen.key_mask is not None:
        hidden = ~seen.key_mask[:, None, :, None]
        difference, teacher = difference.masked_fill(hidden, 0), teacher.masked_fill(hidden, 0)
    return difference.square().sum((1, 2, 3)), teacher.square().sum((1, 2, 3))


def relative_error(core: nn.Module, seen: Observation) -> Tensor:
    """The share of the teacher's output that the student misses: 0 is exact, 1 is as bad as no output at all.

    ``mean_b sum |student - teacher|^2 / sum |teacher|^2``: the mean squared error in units that all layers share. It is
    a mean over rows, so that processes that share the rows each compute a part of the loss.
    """
    difference, size = output_error(core, seen)
    return (difference / size.clamp_min(torch.finfo(size.dtype).tiny)).mean()


def row_divergence(core: nn.Module, seen: Observation, *, causal: bool) -> Tensor:
    """``mean_t sum_s p_ts log(p_ts / w_ts)``: cross-entropy of the rows of weights, less the entropy of softmax itself.

    The student's weights w are its outputs for values that are unit vectors, which is right for any attention that is
    linear in its values. Takes ``T^2`` numbers for each head.
    """
    B, H_kv, T, _ = seen.k.shape
    units = torch.eye(T, dtype=seen.v.dtype, device=seen.v.device).expand(B, H_kv, T, T)
    student = core(seen.q, seen.k, units, x=seen.x, key_mask=seen.key_mask)
    student = _wide(student)
    group = seen.q.shape[1] // H_kv
    logits = _wide(seen.q) @ _wide(seen.k).repeat_interleave(group, 1).mT * seen.q.shape[-1] ** -0.5
    visible = torch.ones(T, T, dtype=torch.bool, device=logits.device)
    visible = (visible.tril() if causal else visible)[None, None]
    if seen.key_mask is not None:
        visible = visible & seen.key_mask[:, None, None]
    log_teacher = logits.masked_fill(~visible, float("-inf")).log_softmax(-1)
    smallest = torch.finfo(student.dtype).tiny
    terms = log_teacher.exp() * (log_teacher - student.clamp_min(smallest).log())
    rows = terms.masked_fill(~visible, 0).sum(-1)
    if seen.key_mask is None:
        return rows.mean()
    real = seen.key_mask[:, None].expand_as(rows)
    return rows.masked_fill(~real, 0).sum() / real.sum()


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Loss of each real token after the first, in nats: the mean over these tokens."""
    targets = ids[:, 1:] if mask is None else ids[:, 1:].masked_fill(~mask[:, 1:].bool(), IGNORED)
    return F.cross_entropy(_wide(logits[:, :-1].flatten(0, 1)), targets.flatten(), ignore_index=IGNORED)


def answer_divergence(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """``KL(teacher | student)`` of logits ``(..., classes)``, mean over real tokens or pictures.

    Only the student gets a gradient.
    """
    rows: Tensor = _Divergence.apply(student.flatten(0, -2), teacher.flatten(0, -2))
    return _mean(rows.view(student.shape[:-1]), mask)


class _Divergence(torch.autograd.Function):
    """``sum_c p_c (log p_c - log q_c)`` of each row of logits ``(N, C)``; the gradient of the student's is ``q - p``.

    Rows and their gradients are computed in parts: in fp32 all logits of a batch, and what is derived from them, would
    take many times the memory of the model.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        rows, size = [], max(1, MOST_LOGITS // student.shape[-1])
        for first in range(0, len(student), size):
            part = slice(first, first + size)
            log_q, log_p = (_wide(x[part]).log_softmax(-1) for x in (student, teacher))
            p = log_p.exp()
            rows.append(log_p.sub_(log_q).mul_(p).sum(-1))
            if gradient is not None:
                gradient[part] = log_q.exp_().sub_(p)
        ctx.save_for_backward(gradient)
        return torch.cat(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        # Factors stay in fp32, and each product is rounded once.
        return torch.mul(gradient, d_rows.unsqueeze(-1), out=torch.empty_like(gradient)), None


def hidden_distance(student: Tensor, teacher: Tensor, mask: Tensor | None, pooled_weight: float = 1.0) -> Tensor:
    """Of hidden states ``(B, T, C)``: :func:`relative_squares`, and 1 - cosine of their means, ``pooled_weight`` times.

    The mean over tokens is what sentences are compared by.
    """
    squares = relative_squares(student, teacher, mask)
    student, teacher = _wide(student), _wide(teacher)
    real = student.new_ones(student.shape[:2]) if mask is None else mask.to(student)
    weights = (real / real.sum(1, keepdim=True))[..., None]
    cosine = F.cosine_similarity((student * weights).sum(1), (teacher * weights).sum(1), dim=-1)
    return squares + pooled_weight * (1 - cosine).mean()


def relative_squares(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """``|student - teacher|^2 / |teacher|^2`` of hidden states ``(B, T, C)``, mean over real tokens."""
    student, teacher = _wide(student), _wide(teacher)
    return _mean((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-12), mask)


def answer_of(output: Any) -> tuple[Tensor, bool]:
    """The logits of a model's output and True or, without logits, its last hidden states and False."""
    if isinstance(output, Tensor):
        return output, True
    logits = getattr(output, "logits", None)
    return (output.last_hidden_state, False) if logits is None else (logits, True)


def _wide(x: Tensor) -> Tensor:
    """x in fp32 at least."""
    return x.to(compute_dtype(x))


def _mean(rows: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or mask.shape != rows.shape:
        return rows.mean()
    real = mask.bool()
    return rows.masked_fill(~real, 0).sum() / real.sum()
