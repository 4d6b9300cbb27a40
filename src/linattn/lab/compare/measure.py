"""Measures the cost of each mechanism in the host, and its attention after training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.analysis.statistics import model_statistics, token_heat_map
from linattn.lab.bench.cost import model_cost, throughput_in_turns, train_peak_bytes
from linattn.lab.compare.cells import Cell
from linattn.lab.compare.host import Host, create_host, layer_to_show
from linattn.lab.compare.settings import CompareConfig
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.accelerator import matrix_products
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.support.compiling import compile_blocks

STATISTICS_IMAGES = 32
EXAMPLES = 4
OnWork = Callable[[str], None]
Create = Callable[[str], nn.Module]


def measure_costs(
    train: TrainConfig, mechanisms: list[str], data: ImageData | ImageFolders, on_work: OnWork, *, create: Create
) -> dict[str, dict[str, Any]]:
    """The costs of each mechanism by name; ``create`` makes the model around a mechanism.

    On a CPU mechanisms are timed in turns, so that a busy moment affects all of them. A GPU has no such moments, and
    compiled code of one mechanism would get in the way of the others', so they are measured one after the other.
    """
    device = torch.device(train.device)
    images, _ = next(iter(create_batches(data, train, device).train(0)))
    costs: dict[str, dict[str, Any]] = {}
    for names in groups_to_measure(mechanisms, device):
        if train.compile:
            torch.compiler.reset()
        models = {name: create(name).to(device) for name in names}
        costs |= _measure_together(train, models, data, images, on_work)
    return costs


def groups_to_measure(names: list[str], device: torch.device) -> list[list[str]]:
    """Groups of mechanisms that are timed in turns."""
    return [[name] for name in names] if device.type == "cuda" else [names]


def _measure_together(
    train: TrainConfig,
    models: dict[str, nn.Module],
    data: ImageData | ImageFolders,
    images: Tensor,
    on_work: OnWork,
) -> dict[str, dict[str, Any]]:
    costs: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        on_work(f"{name}: parameters, operations, memory")
        cost = model_cost(model, data.image_size, data.channels)
        if train.compile:
            compile_blocks(model)  # time and memory are to be those of training
        peak = train_peak_bytes(model, images, precision=train.precision)
        costs[name] = {
            "parameters": cost.parameters,
            "mechanism_parameters": cost.mechanism_parameters,
            "flops": cost.flops,
            "attention_flops": cost.attention_flops,
            "state_size": cost.state_size,
            "peak_bytes_train": peak,
        }
    for training, key in ((False, "images_per_second_forward"), (True, "images_per_second_train")):
        whose = f"{next(iter(models))}: " if len(models) == 1 else ""
        on_work(whose + "images per second, " + ("training" if training else "forward"))
        with matrix_products(train.precision):
            found = throughput_in_turns(models, images, training=training, precision=train.precision)
        for name, images_per_second in found.items():
            costs[name][key] = images_per_second
    return costs


def measure_attention(
    config: CompareConfig, data: ImageData | ImageFolders, cells: list[Cell], on_work: OnWork
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Statistics of attention in trained models, by mechanism, and maps of a few images for ``examples.json``."""
    device = torch.device(config.train.device)
    images, labels, pixels = _test_images(config, data, device)
    statistics: dict[str, dict[str, Any]] = {}
    shown: list[dict[str, Any]] = []
    layer = ""
    for cell in cells:
        on_work(f"{cell.mechanism}: entropy, rank, what truncation loses")
        model = load_trained(config, data, cell).to(device)
        layers = model_statistics(model, images)
        entropies = [value for found in layers for value in found.entropy]
        statistics[cell.mechanism] = {
            "entropy": sum(entropies) / len(entropies),
            "layers": [found.as_dict() for found in layers],
        }
        number, (height, width) = layer_to_show(model, data.image_size)
        layer, centre = layers[number].layer, (height // 2, width // 2)
        for index in range(min(EXAMPLES, len(images))):
            if index == len(shown):
                label = data.classes[int(labels[index])]
                shown.append({"label": label, "pixels": pixels[index], "token": list(centre), "maps": {}})
            heat = token_heat_map(model, images[index], layer=number, token=centre[0] * width + centre[1])
            shown[index]["maps"][cell.mechanism] = [[float(f"{x:.4g}") for x in row] for row in heat.tolist()]
    return statistics, {"layer": layer, "images": shown}


def load_trained(config: CompareConfig, data: ImageData | ImageFolders, cell: Cell) -> Host:
    """Load the model of a finished run."""
    model = create_host(cell.mechanism, config.host, data, cell.seed)
    weights: Path = cell.folder(config.output) / "weights.pt"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def _test_images(
    config: CompareConfig, data: ImageData | ImageFolders, device: torch.device
) -> tuple[Tensor, Tensor, list[Any]]:
    """The first test images as the model sees them, their labels, and their pixels for drawing."""
    images, labels = next(iter(create_batches(data, config.train, device).test()))
    images, labels = images[:STATISTICS_IMAGES], labels[:STATISTICS_IMAGES]
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    grey = (255 * (images - low) / (high - low).clamp(min=1e-6)).round().to(torch.uint8).cpu()
    pixels = grey[:EXAMPLES].squeeze(1) if grey.shape[1] == 1 else grey[:EXAMPLES].movedim(1, -1)
    return images, labels, pixels.tolist()
