"""The attention weights of any mechanism: all of them by probing it with values, a row of them by one backward pass."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.mechanisms.angular import Angular
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.zeros import Zeros
from linattn.ops.shared.rotation import Rotate

# Limit of the numbers in queries, keys, values and features of one call: 2^24 are 64 MiB in fp32.
PROBE_NUMBERS = 2**24


@torch.no_grad()
def attention_map(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    *,
    spatial_shape: tuple[int, int] | None = None,
    x: Tensor | None = None,
    rotate: Rotate | None = None,
    channels: bool = False,
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
        spatial_shape, x, rotate: as the mechanism is called with.
        channels: return the weights of all channels instead of their mean.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("nala", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> weights = attention_map(mechanism, q, k)
        >>> weights.shape, torch.allclose(weights @ v, mechanism(q, k, v), atol=1e-5)
        (torch.Size([1, 2, 5, 5]), True)
    """
    probe = _Probe(linear_part(mechanism), q, k, spatial_shape, x, rotate)
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
        weights[:, :, :, tokens] = columns[labels].movedim(0, -1) if channels else _mix(share, columns)
        expected += torch.einsum("gbhts,bhsg->bhtg", columns, v[:, :, tokens].expand(B, -1, -1, -1))
        scale += columns.abs().sum(-1).movedim(0, -1)
    allowed = torch.finfo(out.dtype).eps ** 0.5 * scale.amax() if out.numel() else 0
    if bool(out.isfinite().all() and ((out - expected).abs() > allowed).any()):
        raise ValueError(
            f"mechanism {type(mechanism).__name__} is not linear in v with channels kept apart, so it has no "
            "attention map"
        )
    return weights


def _mix(share: Tensor, columns: Tensor) -> Tensor:
    return torch.einsum("g,gbhts->bhts", share.to(columns), columns)


@dataclass(frozen=True)
class _Probe:
    """Calls a mechanism with fixed q and k and any number of values."""

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    spatial_shape: tuple[int, int] | None
    x: Tensor | None
    rotate: Rotate | None

    def __call__(self, values: Tensor) -> Tensor:
        """Values ``(P, B or 1, H_kv or 1, Tk, D)`` to outputs ``(P, B, H, Tq, D)``."""
        P = values.shape[0]
        q, k = (t.expand(P, *t.shape).flatten(0, 1) for t in (self.q, self.k))
        x = None if self.x is None else self.x.expand(P, *self.x.shape).flatten(0, 1)
        v = values.expand(P, *self.k.shape).flatten(0, 1)
        out: Tensor = self.mechanism(q, k, v, spatial_shape=self.spatial_shape, x=x, rotate=self.rotate)
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
            labels.append(near.index(True) if any(near) else len(first))
            if not any(near):
                first.append(channel)
        return torch.tensor(labels, device=out.device)

    def columns(self, labels: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield some tokens at a time, and their weights in each kind of channel: ``(G, B, H, Tq, tokens)``."""
        Tk = self.k.shape[2]
        kinds = [(labels == g).nonzero().flatten() for g in range(int(labels.max()) + 1)]
        at_once = min(len(kind) for kind in kinds)  # tokens that one probe examines
        readers = torch.stack([kind[:at_once] for kind in kinds])  # (G, at_once): a channel for each of them
        per_call = self._probes_per_call() * at_once
        for start in range(0, Tk, per_call):
            tokens = torch.arange(start, min(start + per_call, Tk), device=self.k.device)
            probe, place = (tokens - start) // at_once, (tokens - start) % at_once
            values = self.k.new_zeros(int(probe[-1]) + 1, 1, 1, Tk, labels.numel())
            for own in readers:
                values[probe, 0, 0, tokens, own[place]] = 1
            out = self(values)  # (P, B, H, Tq, D)
            found = torch.stack([out[probe, ..., own[place]] for own in readers])  # (G, tokens, B, H, Tq)
            yield slice(start, start + len(tokens)), found.movedim(1, -1)

    def _probes_per_call(self) -> int:
        (B, H, Tq, D), (_, H_kv, Tk, _) = self.q.shape, self.k.shape
        width = D + max(D, int(getattr(self.mechanism, "num_features", D)))
        return max(1, PROBE_NUMBERS // max(1, B * (H * Tq + 2 * H_kv * Tk) * width))

    def random_values(self, *shape: int) -> Tensor:
        """Fixed random values from 1/2 to 3/2, ``(1, ...)``: with weights of one sign their sums cannot cancel."""
        generator = torch.Generator().manual_seed(0)
        return (0.5 + torch.rand(1, *shape, generator=generator, dtype=torch.float64)).to(self.k)


def attention_row(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    token: int,
    *,
    spatial_shape: tuple[int, int] | None = None,
    x: Tensor | None = None,
    rotate: Rotate | None = None,
) -> Tensor:
    """Compute the attention weights of the query at ``token``: ``(B, H, Tk)``, the mean over the channels of v.

    ``w_ts = sum_ij d o_ti / d v_sj / D``: since the output is linear in v, its gradient contains the weights of all
    keys at once, and memory grows only linearly with T. Query heads that share a key head take a backward pass each.

    Args:
        mechanism, q, k, spatial_shape, x, rotate: as in ``attention_map``, of which this is a row.
        token: from 0 to Tq - 1, or negative, counted from the end.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("softmax", num_heads=2, head_dim=8)
        >>> q, k = torch.randn(2, 1, 2, 5, 8).unbind()
        >>> row = attention_row(mechanism, q, k, token=3)
        >>> row.shape, torch.allclose(row, (q[:, :, 3:4] @ k.mT / 8**0.5).softmax(-1)[:, :, 0])
        (torch.Size([1, 2, 5]), True)
    """
    if isinstance(token, bool) or not isinstance(token, int) or not -q.shape[2] <= token < q.shape[2]:
        raise ValueError(f"token must be an integer from {-q.shape[2]} to {q.shape[2] - 1}, got {token!r}")
    q, k, x = q.detach(), k.detach(), None if x is None else x.detach()
    group = q.shape[1] // k.shape[1]
    with torch.enable_grad():
        v = torch.zeros_like(k).requires_grad_()
        out = linear_part(mechanism)(q, k, v, spatial_shape=spatial_shape, x=x, rotate=rotate)
        # The gradients of query heads that share values would add up, so each group passes one head at a time.
        heads = [out[:, h::group, token].mean(-1).sum() for h in range(group)]
        rows = [torch.autograd.grad(head, v, retain_graph=True)[0].sum(-1) for head in heads]  # (B, H_kv, Tk)
    return torch.stack(rows, dim=2).flatten(1, 2)


def linear_part(mechanism: Mechanism) -> Mechanism:
    """The mechanism without what it does to its output after the values are summed.

    Attention weights are the factors of the values: ``o_t = sum_s w_ts v_s``. The angular mechanism then scales its
    output to length 1, which is not a weighting, so here it is divided by its row sum instead. Zeros ends in a norm
    over the channels of a head, which is left out.

    Example:
        >>> from linattn import create_mechanism
        >>> linear_part(create_mechanism("angular", num_heads=2, head_dim=8)).output_norm
        'sum'
    """
    if isinstance(mechanism, Angular) and mechanism.output_norm != "sum":
        bare = copy.copy(mechanism)  # shares the parameters; only the option differs
        bare.output_norm = "sum"
        return bare
    if isinstance(mechanism, Zeros) and mechanism.head_norm:
        unscaled = copy.copy(mechanism)
        unscaled.head_norm = False
        return unscaled
    return mechanism


def checked_rotation(mechanism: Mechanism, q: Tensor, k: Tensor, rotate: Rotate | None) -> tuple[Tensor, Tensor]:
    """q and k as ``attend`` gets them: rotated if the mechanism rotates its inputs, unchanged if it rotates features.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> q, k = torch.ones(2, 1, 2, 3, 8).unbind()
        >>> relu = create_mechanism("relu", num_heads=2, head_dim=8)
        >>> checked_rotation(relu, q, k, lambda q, k: (-q, -k))[0].min()
        tensor(1.)
    """
    return rotate(q, k) if rotate is not None and mechanism.rotates == "inputs" else (q, k)
