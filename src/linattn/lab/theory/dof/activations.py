"""Points on which the kernel is evaluated: random ones, from a file, or from inside a pretrained model."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from linattn.convert.degrees.observe import SeenPairs, watch
from linattn.convert.degrees.points import Reservoir
from linattn.lab.theory.dof.settings import DofConfig
from linattn.support.extras import need
from linattn.support.options import OptionError

SEQUENCES, LENGTH = 16, 256  # what a model reads


class Head(NamedTuple):
    """Points of one head: ``(J, D)``, queries and keys together."""

    source: str
    name: str
    points: Tensor


def random_heads(config: DofConfig) -> list[Head]:
    """Normal vectors whose channels have variances that fall as 1 / i, like those of trained heads."""
    generator = Generator().manual_seed(config.seed)
    variance = 1 / torch.arange(1, config.dim + 1, dtype=torch.float64)
    variance *= config.norm * config.dim**0.5 / variance.sum()
    shape = (config.heads, config.points, config.dim)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * variance.sqrt()
    return [Head("random", f"draw {i}", points) for i, points in enumerate(drawn)]


def real_heads(config: DofConfig) -> list[Head]:
    """Choose ``config.heads`` heads of the source, spread over its layers."""
    assert config.activations is not None
    path = config.activations
    layers = _of_model(config) if path.is_dir() else _of_file(path, config)
    found = [
        Head(path.stem, f"layer {index}, head {head}", points)
        for index, reservoir in sorted(layers.items())
        for head, points in enumerate(reservoir.points())
    ]
    count = min(config.heads, len(found))
    return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]


def _of_file(path: Path, config: DofConfig) -> dict[int, Reservoir]:
    arrays = _arrays(path)
    if not {"q", "k"} <= arrays.keys() or any(arrays[name].dim() != 4 for name in "qk"):
        raise OptionError("activations", f"must hold q (B, H, T, D) and k (B, H_kv, T, D), {path} has {sorted(arrays)}")
    reservoir = Reservoir(config.points, config.seed)
    try:
        reservoir.add(arrays["q"].float(), arrays["k"].float())
    except ValueError as error:
        raise OptionError("activations", str(error)) from error
    return {0: reservoir}


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        need("a safetensors file", "safetensors")
        from safetensors.torch import load_file

        return dict(load_file(path))
    if path.suffix == ".npz":
        need("an npz file", "numpy")
        import numpy as np

        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return dict(torch.load(path, weights_only=True))


def _of_model(config: DofConfig) -> dict[int, Reservoir]:
    need("a pretrained model", "transformers", "safetensors")
    from transformers import AutoModelForCausalLM

    assert config.activations is not None
    model: Any = AutoModelForCausalLM.from_pretrained(config.activations, dtype=torch.float32).eval()
    layers: dict[int, Reservoir] = {}

    def see(pairs: SeenPairs) -> None:
        layers.setdefault(pairs.layer_idx, Reservoir(config.points, config.seed)).add(pairs.q, pairs.k, pairs.key_mask)

    watch(model, _tokens(model, config).split(4), see)
    return layers


def _tokens(model: Any, config: DofConfig) -> Tensor:
    length = min(LENGTH, int(getattr(model.config, "max_position_embeddings", LENGTH)))
    if config.text is None:
        torch.manual_seed(config.seed)
        start = model.config.bos_token_id
        first = torch.full((SEQUENCES, 1), 0 if start is None else start)
        options = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(first, attention_mask=first.new_ones(first.shape), max_new_tokens=length - 1, **options)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.activations)
    ids = torch.tensor(tokenizer(config.text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    rows = min(len(ids) // length, SEQUENCES)
    if not rows:
        raise OptionError("text", f"must have at least {length} tokens, {config.text} has {len(ids)}")
    return ids[: rows * length].view(rows, length)
