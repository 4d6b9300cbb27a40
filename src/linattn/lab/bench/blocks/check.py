"""Checks outputs and gradients of a block against fp64, before any of its rows is measured.

The exact values are those of the block in fp64 with the other form of its mechanism: the full matrix of weights
(``impl="reference"``) or, for softmax with a materialised map, PyTorch's own softmax attention. The budget comes from
data: ``err <= 2 (err(plain) + eps max(abs(exact)))``, where plain is that other form in the precision that is measured.

The residual hides what attention adds to it, so the attention layer is also checked by itself: its output, and the
gradients of its q, k and v. The exact computation starts from the block's own q, k and v, with their rounding: a value
near 0 that rounding moves over the kink of a ReLU changes a gradient completely, and would hide any other error.
"""

import torch
from torch import Tensor, nn

from linattn.lab.bench.blocks.settings import BlocksConfig
from linattn.lab.bench.blocks.subjects import BlockContender, draw_tokens, near_square, precision_of
from linattn.lab.bench.oracle import Verdict
from linattn.models.vision.block import Block

CHECKED_TOKENS = 196


def check_block(contender: BlockContender, block: Block, config: BlocksConfig) -> Verdict:
    """Verdict on the tensor that uses most of its budget, with errors relative to max(abs(exact))."""
    twin_impl = "auto" if contender.impl == "reference" else "reference"
    twin = contender.create(config, twin_impl)
    x = draw_tokens(config, CHECKED_TOKENS, batch=1)
    grad = draw_tokens(config, CHECKED_TOKENS + 1, batch=1)[:, 1:]
    with torch.no_grad(), precision_of(x.device, config.autocast):
        qkv = _projection(block)(block.norm1(x))
    found = _results(block, x, grad, qkv, config.autocast)
    plain = _results(twin, x, grad, qkv, config.autocast)
    exact = _results(twin.double(), x.double(), grad.double(), qkv.double(), autocast=False)
    eps = torch.finfo(torch.bfloat16 if config.autocast else torch.float32).eps
    against = f"fp64, {CHECKED_TOKENS} tokens"
    verdicts = []
    for name, reference in exact.items():
        scale = reference.abs().max().item() or 1.0
        error, own = (_distance(results[name], reference) / scale for results in (found, plain))
        budget = 2 * (own + eps)
        verdicts.append(Verdict(error <= budget, name, error, budget, against))
    # NaN compares false and thus counts as wrong; among wrong tensors, or among right ones, the fullest budget is
    # shown.
    return max(verdicts, key=lambda v: (not v.ok, v.error / v.budget))


def _projection(block: Block) -> nn.Linear:
    assert block.attn.qkv is not None
    return block.attn.qkv


def _results(block: Block, x: Tensor, grad: Tensor, qkv: Tensor, autocast: bool) -> dict[str, Tensor]:
    """Results of the block with ``qkv (B, T, 3C)`` as values of its projection; the gradient still flows to x."""
    seen: dict[str, Tensor] = {}

    def replace(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        seen["qkv"] = output + (qkv - output).detach()
        return seen["qkv"]

    hooks = [
        _projection(block).register_forward_hook(replace),
        block.attn.register_forward_hook(lambda module, inputs, output: seen.update(attention=output)),
    ]
    try:
        x = x.detach().clone().requires_grad_()
        with precision_of(x.device, autocast):
            output = block(x, near_square(x.shape[1]))
    finally:
        for hook in hooks:
            hook.remove()
    to_x, to_qkv = torch.autograd.grad(output, [x, seen["qkv"]], grad.to(output.dtype))
    found = {"output": output, "output of attention": seen["attention"], "gradient of x": to_x}
    for name, part in zip("qkv", to_qkv.chunk(3, dim=-1), strict=True):
        found[f"gradient of {name}"] = part
    return {name: t.detach() for name, t in found.items()}


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b).abs().max().item()
