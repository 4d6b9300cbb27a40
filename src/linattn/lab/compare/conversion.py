"""``linattn compare conversion``: a softmax model converted to each mechanism and trained further."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from linattn.lab.cases import Case, Outcome, Work, find
from linattn.lab.compare.comparison import Phase, start_compiling
from linattn.lab.compare.images import ImageComparison, Images
from linattn.lab.page.numbers import counted
from linattn.lab.train.accelerator import create_accelerator, matrix_products
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import evaluate
from linattn.layers.attention_options import LAYER_SETS
from linattn.mechanisms.registry import list_mechanisms, mechanism_info, mechanism_options
from linattn.models.vision import ConversionReport, convert
from linattn.support.checkpoint import RunFolder
from linattn.support.config import option
from linattn.support.extras import need
from linattn.support.options import OptionError

# Options with which a mechanism starts as close to the softmax model as its formula allows.
START_OPTIONS: dict[str, dict[str, Any]] = {"mirror": {"reflections": 2}}
SOURCE = "before conversion"  # the name of a softmax model while it is trained


@dataclass(frozen=True, kw_only=True)
class CompareConversion(ImageComparison):
    """Train a softmax DeiT for each seed, convert it to other mechanisms, and train each for a share of its epochs.

    The table has the accuracy before the conversion, right after it and at the end. Started again, it goes on.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """

    name: ClassVar[str] = "compare conversion"
    of_cases: ClassVar[tuple[str, ...]] = ("mechanisms", "seeds", "finetune_lr", "option", "margin", "device")

    mechanisms: tuple[str, ...] = option(
        ("softmax", "relu", "nala", "mirror"),
        "Mechanisms, with commas; softmax is the same model, trained on as long as the others.",
        choices=list_mechanisms, group="Comparison",
    )  # fmt: skip
    seeds: int = option(3, "Softmax models, each converted to every mechanism.", least=1, group="Comparison")
    lr: float = option(  # type: ignore[assignment]
        1e-3, "Highest learning rate of the softmax model.", above=0, group="Training", default_text="by recipe"
    )
    finetune_lr: tuple[float, ...] = option(
        (), "After the conversion; of several, each mechanism takes its best on held-out training images.", above=0,
        group="Comparison", default_text="as before",
    )  # fmt: skip
    share: float = option(0.1, "Epochs after the conversion over those before it.", above=0, most=1, group="Comparison")
    size: Literal["tiny", "small", "base"] = option("tiny", "Size of timm's DeiT.", group="Host")
    patch_size: int | None = option(
        None, "Pixels of a token's side.", least=1, group="Host", default_text="4; of digits 2"
    )
    depth: int = option(12, "Blocks of the model.", least=1, group="Host")

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / f"conversion-{Path(self.data).stem}"

    def check(self) -> None:
        super().check()
        for name in self.mechanisms:
            # Options of the conversion itself are not options of a mechanism.
            known = [option for option in mechanism_options(mechanism_info(name).cls) if option not in LAYER_SETS]
            if unknown := ", ".join(self.options(name).keys() - known):
                raise OptionError("option", f"{name} has no {unknown}; it takes {', '.join(known) or 'none'}")

    def options(self, name: str) -> dict[str, Any]:
        return START_OPTIONS.get(name, {}) | super().options(name)

    def points(self, name: str) -> list[dict[str, Any]]:
        return [{"lr": lr} for lr in sorted(set(self.finetune_lr)) or [self.lr]]

    def phases(self) -> Generator[Phase, list[Outcome], None]:
        """First the softmax models that runs convert, each once."""
        sweep = self.sweep_cases()
        runs = self.final_cases({name: {"lr": self.lr} for name in self.mechanisms})
        sources = {(case["seed"], case["validation"]): self.source_of(case) for case in [*sweep, *runs]}
        yield "source", list(sources.values())
        yield from super().phases()

    def source_of(self, case: Case) -> dict[str, Any]:
        """The softmax model that ``case`` converts, with the same seed and the same split of images."""
        common = {key: value for key, value in self.common().items() if key != "share"}
        named = {"kind": "source", "mechanism": SOURCE, "options": {}, "seed": case["seed"]}
        return {**named, "validation": case["validation"], "config": common}

    def model(self, name: str, data: Images, seed: int) -> nn.Module:
        return self.converted(self.softmax_model(data, seed), name, seed)[0]

    def softmax_model(self, data: Images, seed: int) -> nn.Module:
        """Create timm's DeiT for small images, with first weights by ``seed``; it classifies from a class token."""
        need("a conversion", "timm")
        import timm

        shape: dict[str, Any] = {"img_size": tuple(data.image_size), "patch_size": self.pixels(), "depth": self.depth}
        shape |= {"in_chans": data.channels, "num_classes": data.num_classes}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: nn.Module = timm.create_model(f"deit_{self.size}_patch16_224", **shape)
        return model

    def pixels(self) -> int:
        return self.patch_size or (2 if self.data == "digits" else 4)

    def converted(self, model: nn.Module, name: str, seed: int) -> tuple[nn.Module, ConversionReport]:
        """Convert ``model`` to another mechanism, in place; the seed decides weights that are new."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return convert(model, name, **self.options(name))

    def finetuning(self, seed: int, lr: float) -> TrainConfig:
        """How a converted model is trained further: by the same recipe, with a share of its epochs and warm-up."""
        epochs, before = max(1, round(self.share * self.epochs)), self.training(seed, lr)
        return replace(before, epochs=epochs, warmup_epochs=min(self.share * self.warmup_epochs, epochs))

    def source_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        data = self.images(case["validation"])
        if self.compile:
            start_compiling(SOURCE)
        model = self.softmax_model(data, case["seed"])
        return self.fit(case, self.training(case["seed"], self.lr), model, data, work)

    def run_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """The score is that after further training, beside ``before`` and ``converted``: right after it."""
        name, seed, data = case["mechanism"], case["seed"], self.images(case["validation"])
        source, config = self.source_of(case), self.finetuning(seed, case["lr"])
        trained = find(work.folder.parent, source)
        if trained is None:
            raise ValueError("the softmax model that it converts was not trained")
        if self.compile:
            start_compiling(name)
        model = self.softmax_model(data, seed)
        model.load_state_dict(RunFolder(self.weights_of(source, work)).load_weights())
        model, report = self.converted(model, name, seed)
        batches = create_batches(data, config, config.place())
        with matrix_products(config.precision):
            converted = evaluate(model.to(config.place()), batches.test(), create_accelerator(config)).accuracy
        counts = {part: len(getattr(report, part)) for part in ("kept", "initialised", "dropped")}
        before = {"before": trained["score"], "converted": converted, "conversion": counts}
        return {**self.fit(case, config, model, data, work), **before}

    def describe(self) -> dict[str, Any]:
        data = self.images()
        model: Any = self.softmax_model(data, 0)
        (height, width), prefix = model.patch_embed.grid_size, model.num_prefix_tokens
        host = {"size": f"deit_{self.size}", "patch_size": [self.pixels()] * 2, "depth": len(model.blocks)}
        host |= {"width": model.embed_dim, "tokens": height * width + prefix}
        after = self.finetuning(0, self.lr).epochs
        about = (
            f"{', '.join(self.mechanisms)} in {host['size']} of depth {host['depth']} at {host['tokens']} tokens on "
            f"{data.name}: {counted(self.epochs, 'epoch')} on softmax, converted and trained for "
            f"{counted(after, 'more epoch')}, {counted(self.seeds, 'seed')}"
        )
        return {"kind": "conversion", "data": self.describe_data(), "host": host, "epochs_after": after, "about": about}
