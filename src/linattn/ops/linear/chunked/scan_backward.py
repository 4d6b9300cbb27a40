"""The gradient of the causal pass: blocks in reverse, with the states before them computed anew."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.linear.chunked.blocks import Block, Scan
from linattn.ops.linear.chunked.decay import NoDecay
from linattn.ops.linear.chunked.scan import States, advance


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None


def backward(scan: Scan, kv: Tensor, z: Tensor, d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor) -> Gradients:
    """Gradients of the inputs; ``d_kv`` and ``d_z`` of the final state become those of the initial state, in place.

    The decay's gradient needs no score matrix: through the potentials it is ``q.dq - k.dk`` token by token, plus
    the effect of the chunk's total decay on the state.
    """
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in scan[:3])
    a = scan.log_decay
    da = None if a is None else torch.zeros(a.shape, dtype=scan.dtype, device=a.device)
    blocks = scan.blocks()
    starts = []
    for block in blocks:
        starts.append((kv[block.states].clone(), z[block.states].clone()))
        advance(scan.decay(block), block, scan.cut(scan.k, block), scan.cut(scan.v, block), kv, z)
    for block in reversed(blocks):
        kv[block.states], z[block.states] = starts.pop()
        q, k, v = scan.tokens(block)
        decay = scan.decay(block)
        kv_in, z_in = advance(decay, block, k, v, kv, z)
        d_out, d_sum = scan.cut(d_num, block), scan.cut(d_den, block)
        d_kv_out, d_z_out = _retreat(decay, block, decay.read(q), d_out, d_sum, d_kv, d_z)
        q_part, k_part, v_part = decay.pull_back(q, k, v, d_out, d_sum)
        q_part += decay.read(torch.bmm(d_out, kv_in.mT).addcmul_(d_sum, z_in.mT))
        k_state = decay.write(torch.baddbmm(d_z_out.mT, v, d_kv_out.mT))
        k_part += k_state
        v_part.baddbmm_(decay.write(k), d_kv_out)
        if da is not None:
            d_keep = decay.kept((d_kv_out * kv_in).sum(-1) + (d_z_out * z_in).squeeze(-1))
            d_total = (k * k_state).sum(1) + d_keep  # (N, K)
            d_f = (q * q_part).view(k.shape[0], -1, *k.shape[1:]).sum(1) - k * k_part  # (N, L, K)
            _add_decay_gradient(da, d_f, d_total, block, scan.key_index)
        scan.put(q_part, dq, block)
        scan.put(k_part, dk, block)
        scan.put(v_part, dv, block)
    return Gradients(dq, dk, dv, da)


def _retreat(
    decay: NoDecay, block: Block, read: Tensor, d_out: Tensor, d_sum: Tensor, d_kv: Tensor, d_z: Tensor
) -> tuple[Tensor, Tensor]:
    """Move the state's gradient before the block, in place; returns the gradients of the state after each chunk."""
    keep = None if decay.keep is None else decay.keep.flip(1)

    def turned(x: Tensor) -> Tensor:
        """The chunks of each row in reverse."""
        return x.unflatten(0, (-1, block.chunks)).flip(1).flatten(0, 1)

    d_kv_out, d_z_out = States(block, d_kv), States(block, d_z)
    read = turned(read).mT
    torch.bmm(read, turned(d_out), out=d_kv_out.gains)
    torch.bmm(read, turned(d_sum), out=d_z_out.gains)
    return turned(d_kv_out.accumulate(keep)), turned(d_z_out.accumulate(keep))


def _add_decay_gradient(da: Tensor, d_f: Tensor, d_total: Tensor, block: Block, key_index: bool) -> None:
    """Add decay gradients from those of potentials: f_t sums the decays of its chunk up to t, or only those before."""
    if da.ndim == 2:
        d_f, d_total = d_f.sum(-1), d_total.sum(-1)
    later = d_f.flip(1).cumsum(1).flip(1)
    if key_index:
        later = later - d_f
    later = (later + d_total.unsqueeze(1)).view(-1, block.end - block.start, *later.shape[2:])
    if da.shape[1] == 1:
        da[block.rows] += later.sum(1, keepdim=True)
    else:
        da[block.rows, block.start : block.end] = later
