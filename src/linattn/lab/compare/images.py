"""``linattn compare``: mechanisms in one host on images, by top-1 on test images."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linattn.analysis.statistics import model_statistics, token_heat_map
from linattn.lab.bench.cost import model_cost
from linattn.lab.cases import Case, Work
from linattn.lab.compare.comparison import Comparison, start_compiling
from linattn.lab.compare.costs import step_costs
from linattn.lab.page.numbers import counted
from linattn.lab.tasks.images import ImageData, ImageFolders, across_classes
from linattn.lab.tasks.load import load_images
from linattn.lab.train.augment import Augment
from linattn.lab.train.batches import create_batches, test_pictures
from linattn.lab.train.config import ImageTraining, TrainConfig, option_or
from linattn.lab.train.host import PYRAMID, VisionHost, layer_to_show
from linattn.lab.train.loop import check_energy, train
from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.support.checkpoint import RunFolder
from linattn.support.compiling import compile_blocks
from linattn.support.options import OptionError, check_option

Images = ImageData | ImageFolders
VALIDATION_SHARE = 0.1  # of the training images, held out while learning rates are chosen
STATISTICS_IMAGES = 32
EXAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class ImageComparison(ImageTraining, Comparison):
    """What comparisons on images have in common, whatever the model around a mechanism."""

    def check(self) -> None:
        super().check()
        for name in self.mechanisms:
            check_option("mechanisms", name, list_mechanisms(bidirectional=True))
        check_energy(self.energy_loss, (mechanism_info(name).cls for name in self.mechanisms))

    def model(self, name: str, data: Images, seed: int) -> nn.Module:
        """The untrained model around a mechanism."""
        raise NotImplementedError

    def check_hosts(self) -> None:
        data = self.images()
        for name in self.mechanisms:
            try:
                self.model(name, data, 0)
            except (ValueError, TypeError) as error:
                raise option_or("mechanisms", error, name, self.options(name)) from error
        create_batches(data, self.training(0, 1.0), torch.device("cpu"))

    def images(self, validation: bool = False) -> Images:
        return loaded(self.data, self.image_size, validation)

    def training(self, seed: int, lr: float) -> TrainConfig:
        """How one run is trained."""
        common = {field.name: getattr(self, field.name) for field in fields(ImageTraining)}
        return TrainConfig(**common | {"seed": seed, "lr": lr, "min_lr": min(self.min_lr, lr)})

    def usual_lr(self, name: str) -> float:
        return TrainConfig().lr

    def fit(self, case: Case, config: TrainConfig, model: nn.Module, data: Images, work: Work) -> dict[str, Any]:
        """Train a model, or go on with it."""
        batches = create_batches(data, config, config.place())

        def on_step(epoch: int, step: int, loss: float, top1: float) -> None:
            words = f"epoch {epoch + 1} of {config.epochs}, loss {loss:.3f}, right in training {top1:.1f} %"
            work.tell((epoch + step / batches.steps_per_epoch) / config.epochs, words)

        model = model.to(config.place())
        found = train(model, batches, config, work.folder, options=case["options"], on_step=on_step)
        records = []
        for record in map(asdict, found.epochs):
            records.append({"round": record.pop("epoch") + 1, "score": record.pop("top1"), **record})
        return {"score": found.top1, "seconds": found.seconds, "records": records}

    def cost_case(self, case: Case, work: Work) -> dict[str, Any]:
        data, config = self.images(), self.training(0, 1.0)
        device, models, counts = config.place(), dict[str, nn.Module](), {}
        images, _ = next(iter(create_batches(data, config, device).train(0)))
        for name in (part["mechanism"] for part in case["mechanisms"]):
            if self.compile:
                start_compiling(name)
            models[name] = self.model(name, data, 0).to(device)
            counts[name] = asdict(model_cost(models[name], (images.shape[2], images.shape[3]), images.shape[1]))
            if self.compile:
                compile_blocks(models[name])  # time and memory are to be those of training
        losses = {name: (model, partial(_loss, model, images)) for name, model in models.items()}
        found = step_costs(losses, "image", len(images), device, self.precision, work.tell)
        return {"rows": [{"mechanism": name, **counts[name], **cost} for name, cost in found.items()]}

    def describe_data(self) -> dict[str, Any]:
        data = self.images()
        named = {"name": data.name, "classes": list(data.classes), "image_size": list(data.image_size)}
        sizes = {"train": len(data.train), "test": len(data.test)} if isinstance(data, ImageData) else {}
        return {**named, "channels": data.channels, **sizes}


@dataclass(frozen=True, kw_only=True)
class CompareImages(VisionHost, ImageComparison):
    """Train mechanisms in one host with one budget on images, and compare them by accuracy, speed and memory.

    Writes a table, CSV, charts and report.html. Started again, it goes on; mechanisms and seeds can be added.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """

    name: ClassVar[str] = "compare"

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / f"compare-{Path(self.data).stem}"

    def model(self, name: str, data: Images, seed: int) -> nn.Module:
        return self.create(name, data, seed, self.options(name))

    def describe(self) -> dict[str, Any]:
        data = self.images()
        host = self.describe_model(self.create(self.mechanisms[0], data, 0), data.image_size)
        shape = f"stages {host['stages']}" if self.host == PYRAMID else f"depth {host['depth']}, width {host['width']}"
        tokens = str(host["tokens"]).strip("[]")
        about = (
            f"{', '.join(self.mechanisms)} in a {self.host} {self.size} of {shape} at {tokens} tokens on {data.name}"
        )
        about += f", {counted(self.epochs, 'epoch')}, {counted(self.seeds, 'seed')}"
        return {"data": self.describe_data(), "host": host, "about": about}

    def run_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        name, data = case["mechanism"], self.images(case["validation"])
        if self.compile:
            start_compiling(name)
        return self.fit(case, self.training(case["seed"], case["lr"]), self.model(name, data, case["seed"]), data, work)

    @property
    def of_trained(self) -> dict[str, dict[str, Any]]:
        return {"attention": {}}

    def attention_case(self, case: Case, work: Work) -> dict[str, Any]:
        """Statistics of attention, and maps of a few images of different classes."""
        data, of = self.images(), case["of"]
        work.tell(0.0, "entropy, rank, what truncation loses")
        model: Any = self.model(of["mechanism"], data, of["seed"])
        model.load_state_dict(RunFolder(self.weights_of(of, work)).load_weights())
        model = model.to(self.place()).eval()
        images, labels = test_images(data, self, STATISTICS_IMAGES)
        images = images.to(self.place())
        layers = model_statistics(model, images)
        entropies = [value for found in layers for value in found.entropy]
        number, (height, width) = layer_to_show(model, data.image_size)
        token = height // 2, width // 2
        shown: list[dict[str, Any]] = []
        for image, label in zip(images[:EXAMPLES], labels.tolist(), strict=False):
            work.tell(0.5 + len(shown) / EXAMPLES / 2, "where tokens look")
            heat = token_heat_map(model, image, layer=number, token=token[0] * width + token[1])
            heat_rows = [[float(f"{x:.4g}") for x in row] for row in heat.tolist()]
            shown.append({"label": data.classes[label], "pixels": pixels_of(image), "token": token, "map": heat_rows})
        return {
            "entropy": sum(entropies) / len(entropies),
            "layers": [found.as_dict() for found in layers],
            "examples": {"layer": layers[number].layer, "images": shown},
        }


def _loss(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    logits = model(images)
    labels = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return nn.functional.cross_entropy(logits, labels), logits, labels


@lru_cache(maxsize=2)
def loaded(source: str, image_size: int | None, validation: bool) -> Images:
    """The data, or training images split in two, to choose learning rates without the test images."""
    if not validation:
        return load_images(source, image_size=image_size)
    data = loaded(source, image_size, False)
    if not isinstance(data, ImageData):
        raise OptionError("lr", "several of them are compared on held-out images, which needs data in memory")
    return data.hold_out(VALIDATION_SHARE, seed=0)


def test_images(data: Images, config: ImageTraining, count: int) -> tuple[Tensor, Tensor]:
    """``count`` test images of as many classes as there are, as the model sees them, and their labels."""
    if isinstance(data, ImageFolders):
        pictures = test_pictures(data)
        chosen = across_classes(torch.tensor(pictures.targets), count)
        images, labels = zip(*(pictures[i] for i in chosen.tolist()), strict=True)
        return torch.stack(images), torch.tensor(labels)
    test = data.test.take(across_classes(data.test.labels, count))
    return Augment(config, *data.mean_std()).normalise(test.images), test.labels


def pixels_of(image: Tensor) -> list[Any]:
    """A normalised image ``(C, H, W)`` for drawing: ``(H, W)`` or ``(H, W, 3)``, 0 to 255."""
    grey = (255 * (image - image.min()) / (image.max() - image.min()).clamp(min=1e-6)).round().to(torch.uint8).cpu()
    found: list[Any] = (grey[0] if len(grey) == 1 else grey.movedim(0, -1)).tolist()
    return found
