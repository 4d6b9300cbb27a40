"""The attention weights of any mechanism: all of them by probing it with values, a row of them by one backward pass."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.mechanisms.angular import Angular
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.zeros import Zeros

# Limit of the numbers in queries, keys, values and features of one call: 2^24 are 64 MiB in fp32.
PROBE_NUMBERS = 2**24


@torch.no_grad()
def attention_map(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    *,
    x: Tensor | None = None,
    channels: bool = False,
    **options: Any,
) -> Tensor:
    """Compute the weights ``w_ts`` of ``o_t = sum_s w_ts v_s``: ``(B, H, Tq, Tk)``.

    Every mechanism is linear in v, whatever it does with q and k, so values that are 1 at one token and 0 elsewhere
    return that token's column. Channels of v with equal weights (nearly always all of them) can probe different tokens
    in one call. Where weights depend on the channel (the flows of ``pola`` and ``pola_plus``, ``hydra``) the mean over
    channels is returned, or with ``channels=True`` all of them, ``(B, H, Tq, Tk, D)``. Apart from the result, memory is
    bounded. The result is checked against the mechanism, which must be linear in v and keep channels apart.

    Args:
        mechanism: in the mode and on the device to be examined.
        q, k: ``(B, H, Tq, D)`` and ``(B, H_kv, Tk, D)``, as the mechanism is called with.
        x, options: ``spatial_shape`` and ``rotate``, as the mechanism is called with.
        channels: return the weights of all channels instead of their mean.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("nala", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> weights = attention_map(mechanism, q, k)
        >>> weights.shape, torch.allclose(weights @ v, mechanism(q, k, v), atol=1e-5)
        (torch.Size([1, 2, 5, 5]), True)
        >>> torch.allclose(attention_row(mechanism, q, k, token=3), weights[:, :, 3], atol=1e-5)
        True
    """
    probe = _Probe(_linear_part(mechanism), q, k, x, options)
    labels = probe.equal_channels()
    (B, H, Tq, D), Tk = q.shape, k.shape[2]
    share = torch.bincount(labels) / D
    first = torch.stack([(labels == kind).nonzero()[0, 0] for kind in range(len(share))])
    v = probe.random_values(k.shape[1], Tk, D)
    out = probe(v.unsqueeze(0))[0][..., first]  # (B, H, Tq, G): one channel of each kind
    v = v[..., first].to(out.dtype).repeat_interleave(H // k.shape[1], dim=1)
    weights = out.new_empty(B, H, Tq, Tk, D) if channels else out.new_empty(B, H, Tq, Tk)
    expected, scale = torch.zeros_like(out), torch.zeros_like(out)
    for tokens, columns in probe.columns(labels):  # for each kind of channel: (G, B, H, Tq, tokens)
        mean = torch.einsum("g,gbhts->bhts", share.to(columns), columns)
        weights[:, :, :, tokens] = columns[labels].movedim(0, -1) if channels else mean
        expected += torch.einsum("gbhts,bhsg->bhtg", columns, v[:, :, tokens].expand(B, -1, -1, -1))
        scale += columns.abs().sum(-1).movedim(0, -1)
    allowed = torch.finfo(out.dtype).eps ** 0.5 * scale.amax() if out.numel() else 0
    if bool(out.isfinite().all() and ((out - expected).abs() > allowed).any()):
        name = type(mechanism).__name__
        raise ValueError(f"mechanism {name} is not linear in v with channels kept apart, so it has no attention map")
    return weights


@dataclass(frozen=True)
class _Probe:
    """Calls a mechanism with fixed q, k and x, and any number of values."""

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    x: Tensor | None
    options: dict[str, Any]

    def __call__(self, values: Tensor) -> Tensor:
        """Values ``(P, B or 1, H_kv or 1, Tk, D)`` to outputs ``(P, B, H, Tq, D)``."""
        P = values.shape[0]
        q, k, x = (None if t is None else t.expand(P, *t.shape).flatten(0, 1) for t in (self.q, self.k, self.x))
        v = values.expand(P, *self.k.shape).flatten(0, 1)
        out: Tensor = self.mechanism(q, k, v, x=x, **self.options)
        return out.unflatten(0, (P, -1))

    def equal_channels(self) -> Tensor:
        """Label each channel, ``(D,)``: channels with the same label have the same weights.

        Values that are equal in all channels give equal outputs where the weights are equal. Two channels that rounding
        sets apart only cost another probe, and two that are taken for one differ by rounding alone.
        """
        out = self(self.random_values(1, self.k.shape[2], 1))[0].flatten(0, 2)  # (B H Tq, D)
        tolerance = torch.finfo(out.dtype).eps ** 0.75 * out.abs().amax() if out.numel() else 0
        labels: list[int] = []
        first: list[int] = []  # the first channel of each kind
        for channel in range(out.shape[1]):
            near = [bool(((out[:, channel] - out[:, j]).abs() <= tolerance).all()) for j in first]
            labels.append([*near, True].index(True))
            first += [] if any(near) else [channel]
        return torch.tensor(labels, device=out.device)

    def columns(self, labels: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield some tokens at a time, and their weights in each kind of channel: ``(G, B, H, Tq, tokens)``."""
        Tk = self.k.shape[2]
        kinds = [(labels == g).nonzero().flatten() for g in range(int(labels.max()) + 1)]
        at_once = min(len(kind) for kind in kinds)  # tokens that one probe examines
        readers = torch.stack([kind[:at_once] for kind in kinds])  # (G, at_once): a channel for each of them
        (B, H, Tq, D), H_kv = self.q.shape, self.k.shape[1]
        width = D + max(D, int(getattr(self.mechanism, "num_features", D)))
        per_call = max(1, PROBE_NUMBERS // max(1, B * (H * Tq + 2 * H_kv * Tk) * width)) * at_once
        for start in range(0, Tk, per_call):
            tokens = torch.arange(start, min(start + per_call, Tk), device=self.k.device)
            probe, place = (tokens - start) // at_once, (tokens - start) % at_once
            values = self.k.new_zeros(int(probe[-1]) + 1, 1, 1, Tk, D)
            for own in readers:
                values[probe, 0, 0, tokens, own[place]] = 1
            out = self(values)  # (P, B, H, Tq, D)
            found = torch.stack([out[probe, ..., own[place]] for own in readers])  # (G, tokens, B, H, Tq)
            yield slice(start, start + len(tokens)), found.movedim(1, -1)

    def random_values(self, *shape: int) -> Tensor:
        """Fixed random values from 1/2 to 3/2, ``(1, ...)``: with weights of one sign their sums cannot cancel."""
        generator = torch.Generator().manual_seed(0)
        return (0.5 + torch.rand(1, *shape, generator=generator, dtype=torch.float64)).to(self.k)


def attention_row(
    mechanism: Mechanism, q: Tensor, k: Tensor, token: int, *, x: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute the attention weights of the query at ``token``: ``(B, H, Tk)``, the mean over the channels of v.

    ``w_ts = sum_ij d o_ti / d v_sj / D``: since the output is linear in v, its gradient contains the weights of all
    keys at once, and memory grows only linearly with T. Query heads that share a key head take a backward pass each.

    Args:
        mechanism, q, k, x, options: as in ``attention_map``, of which this is a row.
        token: from 0 to Tq - 1, or negative, counted from the end.
    """
    if isinstance(token, bool) or not isinstance(token, int) or not -q.shape[2] <= token < q.shape[2]:
        raise ValueError(f"token must be an integer from {-q.shape[2]} to {q.shape[2] - 1}, got {token!r}")
    q, k, x = q.detach(), k.detach(), None if x is None else x.detach()
    group = q.shape[1] // k.shape[1]
    with torch.enable_grad():
        v = torch.zeros_like(k).requires_grad_()
        out = _linear_part(mechanism)(q, k, v, x=x, **options)
        # The gradients of query heads that share values would add up, so each group passes one head at a time.
        heads = [out[:, h::group, token].mean(-1).sum() for h in range(group)]
        rows = [torch.autograd.grad(head, v, retain_graph=True)[0].sum(-1) for head in heads]  # (B, H_kv, Tk)
    return torch.stack(rows, dim=2).flatten(1, 2)


def _linear_part(mechanism: Mechanism) -> Mechanism:
    """The mechanism without what it does to its output after the values are summed.

    Attention weights are the factors of the values: ``o_t = sum_s w_ts v_s``. The angular mechanism then scales its
    output to length 1, which is not a weighting, so here it is divided by its row sum instead. Zeros ends in a norm
    over the channels of a head, which is left out.
    """
    bare = copy.copy(mechanism)  # shares the parameters; only the option differs
    if isinstance(bare, Angular):
        bare.output_norm = "sum"
    if isinstance(bare, Zeros):
        bare.head_norm = False
    return bare
