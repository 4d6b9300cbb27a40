"""The least time that memory and arithmetic allow a case, by what the device reaches, measured in the same run."""

from typing import Any

import torch

from linattn.lab.bench.contenders import FORWARD, TRAINING
from linattn.lab.bench.kernel_cases import Problem
from linattn.lab.bench.kernel_problems import CONSTANT, Tensors, differentiable
from linattn.lab.bench.timing import time_call
from linattn.mechanisms.registry import create_mechanism

SMALLEST_CHUNK = 16  # size of the tiles of a GPU's matrix units


def floors(case: Problem, tensors: Tensors, bandwidth: float, matmul: float) -> dict[str, float]:
    """The least milliseconds that memory and arithmetic allow, by the ceilings of the device.

    ``max(bytes / copy bandwidth, operations / matmul rate)``. In bytes, every input is read once and every output
    written once; backward reads the inputs and the gradient of the output, and writes the gradients. A backward starts
    after its forward has ended, so the floor of both is the sum of the two.
    """
    nbytes = size(tensors) + output_bytes(case, tensors)
    both = zip((nbytes, nbytes + size(differentiable(case, tensors))), operations(case), strict=True)
    seconds = [max(moved / bandwidth, done / matmul) for moved, done in both]
    return {FORWARD: 1000 * seconds[0], TRAINING: 1000 * sum(seconds)}


def operations(case: Problem) -> tuple[int, int]:
    """Operations of forward and backward, counting matrix products alone.

    Per head and token, with K features, V values, L tokens of the smallest chunk; a normaliser counts as one more
    value:

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
    K, V, L = case.K, case.V + (case.normalized or case.family == "exponential"), SMALLEST_CHUNK
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
    if case.causal:
        return (4 * K * V + (L + 1) * (K + V)) * tokens, (10 * K * V + (L + 1) * (3 * K + 2 * V)) * tokens
    if case.decay == "none":
        return 4 * K * V * tokens, 8 * K * V * tokens
    return (8 * K * V + 2 * L * (K + V)) * tokens, (20 * K * V + 2 * L * (3 * K + 2 * V)) * tokens


def size(tensors: Tensors) -> int:
    """Bytes of all tensors; parameters are only a few kilobytes, but they are read."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def output_bytes(case: Problem, tensors: Tensors) -> int:
    """Bytes of the output, which is shaped like v or x; a step also writes its state."""
    names = ("x",) if case.family == "convolution" else ("v", *CONSTANT)
    return size({name: t for name, t in tensors.items() if name in names})


def qkvo_bytes(case: Problem, tensors: Tensors) -> int:
    """The reference for extra memory: q, k, v and the output, or x and the output; also a step's state."""
    large = {name: t for name, t in tensors.items() if name in ("q", "k", "v", "x", "kv")}
    return size(large) + output_bytes(case, tensors)


def measure_ceilings(device: torch.device, small: bool = False) -> dict[str, Any]:
    """Bytes a second of a copy that reads and writes 8.6 GB in all, operations a second of two 8192-cubes in bf16."""
    nbytes, side = (2**24, 256) if small else (2**32, 8192)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Called directly: in a CUDA graph a copy is another kind of node, which moved a third less on an H200.
    copy = time_call(lambda: target.copy_(source), device, milliseconds=100)[1].median
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = time_call(lambda: a @ b, device, milliseconds=100)[0].median
    return {"copy_bytes_per_second": 2 * nbytes / copy, "matmul_per_second": 2 * side**3 / product}
