"""Export of models to other runtimes: as a torch.export program in PyTorch's operators, and as ONNX."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.support.extras import need


def export_program(model: nn.Module, images: Tensor, *, dynamic_batch: bool = True) -> torch.export.ExportedProgram:
    """Export the model in eval mode as a program of PyTorch's own operators, without any of this library's.

    Sums over all keys become the two matrix products that they are, so time stays linear. A decay or a causal mask has
    no such form: such models are exported with ``impl="reference"``, in quadratic time, and refused otherwise. After
    ``fold_reflections(model)`` a mirror adds no cost to the program.

    Args:
        model: on the CPU, or with ``impl="chunked"``, since kernels cannot be exported.
        images: an example ``(B, C, H, W)``; height and width are fixed.
        dynamic_batch: let the program take any number of images; the example must have at least two.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_vit, export_program
        >>> program = export_program(create_vit("digits", "relu"), torch.randn(2, 1, 8, 8))
        >>> program.module()(torch.randn(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """
    if dynamic_batch and images.shape[0] < 2:
        raise ValueError("dynamic_batch=True needs an example of two images at least: one is taken for a fixed size")
    training = model.training
    model.eval()
    try:
        shapes = ({0: torch.export.Dim("batch")},) if dynamic_batch else None
        with torch.no_grad():
            program = torch.export.export(model, (images,), dynamic_shapes=shapes)
    finally:
        model.train(training)
    table: dict[Any, Any] = dict(torch.export.default_decompositions())
    if hasattr(torch.ops.linattn, "total"):
        table[torch.ops.linattn.total.default] = _total
    program = program.run_decompositions(table)
    own = sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("linattn")})
    if own:
        raise ValueError(f"{', '.join(own)} cannot be written in PyTorch's operators: use impl='reference'")
    return program


def export_onnx(model: nn.Module, images: Tensor, path: str | Path, *, dynamic_batch: bool = True) -> None:
    """Write the model as an ONNX file with the input ``images`` and the output ``logits``; see :func:`export_program`.

    Needs ``onnx`` and ``onnxscript``: ``pip install 'linattn[export]'``.
    """
    need("ONNX", "onnx", "onnxscript")
    program = export_program(model, images, dynamic_batch=dynamic_batch)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    torch.onnx.export(program, (), str(path), dynamo=True, verbose=False, external_data=False, **names)


def _total(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``linattn::total`` without its loop over packed sequences, with the same shapes."""
    if cu_seqlens is not None:
        raise ValueError("packed sequences cannot be exported")
    grouped, k, v = (t.to(kv.dtype) for t in (q.unflatten(1, (k.shape[1], -1)), k, v))
    kv, z = kv + k.mT @ v, z + k.sum(-2)
    num, den = grouped @ kv.unsqueeze(2), grouped @ z[:, :, None, :, None]
    return num.flatten(1, 2), den.squeeze(-1).flatten(1, 2), kv, z
