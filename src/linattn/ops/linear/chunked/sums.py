"""Linear attention chunk by chunk: linear time and memory, exact, in plain PyTorch. The default on a CPU."""

from torch import Tensor

from linattn.ops.linear.chunked.library import chunk_scan, total_sums
from linattn.ops.shared.packing import zero_state
from linattn.ops.shared.sweeps import both_ways
from linattn.ops.shared.types import LinearState, Pattern, Sums


def linear_sums(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState | None = None) -> Sums:
    initial = zero_state(k, v, pattern.cu_seqlens) if initial is None else initial
    if pattern.causal:
        return sweep(q, k, v, pattern, initial)
    if pattern.log_decay is not None:
        return both_ways(sweep, q, k, v, pattern, initial)
    num, den, kv, z = total_sums(q, k, v, initial.kv, initial.k, pattern.cu_seqlens)
    return Sums(num, den, LinearState(kv, z))


def sweep(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState, strict: bool = False) -> Sums:
    """One causal pass; in a strict one no token sees itself."""
    key_index = pattern.decay_index == "key"
    chunk = _chunk_size(k, v, pattern)
    num, den, kv, z = chunk_scan(
        q, k, v, initial.kv, initial.k, pattern.log_decay, pattern.cu_seqlens, chunk, key_index, strict
    )
    return Sums(num, den, LinearState(kv, z))


def _chunk_size(k: Tensor, v: Tensor, pattern: Pattern) -> int:
    """Tokens of a chunk, by measurements on CPUs: longer ones compute more hidden pairs, shorter ones more states."""
    per_channel = pattern.log_decay is not None and pattern.log_decay.ndim == 4
    return 32 if per_channel or max(k.shape[3], v.shape[3]) <= 32 else 64
