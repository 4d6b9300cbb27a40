"""The floor of a case: the least time that memory and arithmetic allow, by ceilings measured in the same run.

``floor = max(bytes / copy bandwidth, operations / matmul rate)``. In bytes, every input is read once and every output
written once; backward reads the inputs and the gradient of the output, and writes the gradients. A backward starts
after its forward has ended, so the floor of both is the sum of the two.

Operations per head and token, counting matrix products alone (K features, V values, L tokens of the smallest chunk; a
normaliser counts as one more value):

=============================  ==================================  =====================================
form                           forward                             backward
=============================  ==================================  =====================================
bidirectional                  4 K V                               8 K V
causal, any decay              4 K V + (L + 1) (K + V)             10 K V + (L + 1) (3 K + 2 V)
bidirectional with decay       8 K V + 2 L (K + V)                 20 K V + 2 L (3 K + 2 V)
decoding step                  6 K V                               -
short convolution, W taps      2 W a channel                       4 W a channel
=============================  ==================================  =====================================

In causal forms each chunk writes (2 K V) and reads (2 K V) a state, and pairs inside it cost ``2 (K + V)`` each, of
which a token has (L + 1) / 2 on average. Two sweeps need two states, and every pair of a chunk. Mechanisms report
their own count.
"""

from dataclasses import dataclass

import torch

from linattn.lab.bench.kernels.bound import Tensors
from linattn.lab.bench.kernels.cases import Case
from linattn.lab.bench.kernels.problems import differentiable
from linattn.mechanisms.registry import create_mechanism

SMALLEST_CHUNK = 16  # size of the tiles of a GPU's matrix units


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of the device: bytes per second that a copy reads and writes, operations per second of a product."""

    bandwidth: float
    matmul: float

    def seconds(self, work: "Work") -> float:
        return max(work.nbytes / self.bandwidth, work.operations / self.matmul)


@dataclass(frozen=True)
class Work:
    """The least that a pass must do."""

    nbytes: int
    operations: int


def forward_work(case: Case, tensors: Tensors) -> Work:
    return Work(_size(tensors) + output_bytes(case, tensors), operations(case)[0])


def backward_work(case: Case, tensors: Tensors) -> Work:
    """Work of the backward alone, without the forward before it."""
    gradients = _size(differentiable(case, tensors))
    return Work(_size(tensors) + output_bytes(case, tensors) + gradients, operations(case)[1])


def floor_ms(case: Case, tensors: Tensors, ceilings: Ceilings) -> dict[str, float]:
    """The floor in milliseconds, by the name of the pass."""
    forward = ceilings.seconds(forward_work(case, tensors))
    backward = ceilings.seconds(backward_work(case, tensors))
    return {"forward": 1000 * forward, "forward+backward": 1000 * (forward + backward)}


def output_bytes(case: Case, tensors: Tensors) -> int:
    """Bytes of the output, which is shaped like v or x; a step also writes its state."""
    name = "x" if case.family == "convolution" else "v"
    state = {n: t for n, t in tensors.items() if n in ("kv", "z")}
    return _size({name: tensors[name]}) + _size(state)


def qkvo_bytes(case: Case, tensors: Tensors) -> int:
    """The reference for extra memory: q, k, v and the output, or x and the output; also a step's state."""
    large = {n: t for n, t in tensors.items() if n in ("q", "k", "v", "x", "kv")}
    return _size(large) + output_bytes(case, tensors)


def operations(case: Case) -> tuple[int, int]:
    """Operations of forward and backward."""
    K, V, L = case.K, case.V + case.normalized, SMALLEST_CHUNK
    tokens = case.B * case.H * case.T
    if case.family == "convolution":
        per_channel = 2 * case.taps * case.B * case.T * case.K
        return per_channel, 2 * per_channel
    if case.family == "step":
        return 6 * K * V * tokens, 0
    if case.family == "mechanism":
        module = create_mechanism(case.mechanism, num_heads=case.H, head_dim=case.K, causal=case.causal)
        forward = case.B * module.flops(case.T)
        return forward, 2 * forward
    if case.family == "exponential":
        V = case.V + 1  # its denominator
    if case.causal:
        return (4 * K * V + (L + 1) * (K + V)) * tokens, (10 * K * V + (L + 1) * (3 * K + 2 * V)) * tokens
    if case.decay == "none":
        return 4 * K * V * tokens, 8 * K * V * tokens
    return (8 * K * V + 2 * L * (K + V)) * tokens, (20 * K * V + 2 * L * (3 * K + 2 * V)) * tokens


def _size(tensors: Tensors) -> int:
    """Bytes of all tensors; parameters are only a few kilobytes, but they are read."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def measure_ceilings(device: torch.device, small: bool = False) -> Ceilings:
    """Measure a copy that reads and writes 8.6 GB in all, and the product of two 8192-cubes in bf16."""
    from linattn.lab.bench.kernels.clock import time_call

    nbytes, side = (2**24, 256) if small else (2**32, 8192)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = time_call(lambda: target.copy_(source), device, milliseconds=100)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = time_call(lambda: a @ b, device, milliseconds=100)
    # Called directly: in a CUDA graph a copy is another kind of node, which moved a third less on an H200.
    return Ceilings(2 * nbytes / (copy.called_ms / 1000), 2 * side**3 / (product.timing.median / 1000))
