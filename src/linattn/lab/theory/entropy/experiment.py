"""``linattn lab entropy``: how spread out attention is, and whether it sees the length of its queries."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linattn.analysis.entropy import entropy, entropy_norm_correlation, positive_sequence_entropy
from linattn.lab.cases import Case, Work
from linattn.lab.experiment import Experiment
from linattn.lab.tasks.load import load_images
from linattn.lab.theory.entropy.activations import (
    SEEN,
    Activations,
    attention_rows,
    captured_activations,
    fitting_mechanism,
    random_activations,
    text_activations,
)
from linattn.lab.theory.entropy.theorems import attention_checks, sequence_checks
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig, default_recipe
from linattn.lab.train.loop import train
from linattn.mechanisms.registry import list_mechanisms
from linattn.models.vision import SIZES, create_vit
from linattn.support.config import option
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from pandas import DataFrame

    from linattn.lab.page import Section

SCALES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
HOSTS = ("softmax", "relu", "pola", "nala", "mirror")
BINS = 8
QUICK = {"hosts": HOSTS[:1], "epochs": 1, "images": 4, "batch": 1, "heads": 2, "head_dim": 16, "tokens": 32}
USUAL = {"hosts": HOSTS, "epochs": 10, "images": 32, "batch": 2, "heads": 4, "head_dim": 32, "tokens": 64}


def usual(name: str) -> str:
    full, quick = (",".join(v) if isinstance(v, tuple) else str(v) for v in (USUAL[name], QUICK[name]))
    return f"{full}, with --quick {quick}"


@dataclass(frozen=True, kw_only=True)
class Entropy(Experiment):
    """Attention entropy and the norm of queries.

    Theorems of NaLaFormer, PolaFormer and MirrorLA are checked first. Then the queries are made longer and shorter, on
    random activations and on those of trained models, and the entropy of the rows of attention is measured for every
    mechanism. Exit code 1: a check failed.
    """

    name = "lab-entropy"
    quick: bool = option(False, "One host, one epoch: shows that everything runs.", affects=False)
    mechanisms: tuple[str, ...] = option(
        (), "Mechanisms to measure.", choices=list_mechanisms, default_text="all that are registered", group="What"
    )
    hosts: tuple[str, ...] | None = option(
        None, "Mechanisms to train a small vision transformer with; all mechanisms get the activations of the first "
        "one. Nothing: random activations alone.", default_text=usual("hosts"), group="What",
        choices=lambda: list_mechanisms(bidirectional=True),
    )  # fmt: skip
    scales: tuple[float, ...] = option(
        SCALES, "Factors of all queries, 1 among them.", above=0, group="What", rare=True
    )
    checkpoint: Path | None = option(
        None, "In place of training: a folder of `linattn train`, or a language model for transformers.", group="Models"
    )
    text: Path | None = option(None, "File that a language model reads.", group="Models")
    data: str = option("digits", "Data of the hosts, as for `linattn train images`.", group="Models")
    size: str = option("digits", "Size of the hosts.", choices=tuple(SIZES), group="Models")
    patch_size: int = option(2, "Pixels of a token's side.", least=1, group="Models")
    epochs: int | None = option(
        None, "Epochs that a host is trained for.", least=1, default_text=usual("epochs"), group="Models"
    )
    images: int | None = option(None, "Test images to look at.", least=1, default_text=usual("images"), group="Models")
    batch: int | None = option(
        None, "Sequences of random activations, or of text.", least=1, default_text=usual("batch"), group="Sizes"
    )
    heads: int | None = option(
        None, "Heads of random activations.", least=1, default_text=usual("heads"), group="Sizes"
    )
    head_dim: int | None = option(
        None, "Width of a head of random activations.", least=1, default_text=usual("head_dim"), group="Sizes"
    )
    tokens: int | None = option(
        None, "Tokens of random activations, or of text.", least=8, default_text=usual("tokens"), group="Sizes"
    )
    seed: int = option(0, "Seed of activations, weights and training.", least=0)

    def chosen(self, name: str) -> Any:
        """The value of an option, by ``quick`` where it was not given."""
        value = getattr(self, name)
        return (QUICK if self.quick else USUAL)[name] if value is None else value

    @property
    def reads_text(self) -> bool:
        return self.checkpoint is not None and (self.checkpoint / "config.json").is_file()

    def check(self) -> None:
        if self.chosen("head_dim") % 2:
            raise OptionError("head_dim", f"must be even, since mirrors turn pairs of channels, got {self.head_dim}")
        if 1.0 not in self.scales or len(self.scales) < 2:
            raise OptionError("scales", f"must be numbers above 0, 1 and another one among them, got {self.scales}")
        if self.checkpoint is None:
            return
        if not self.reads_text and not (self.checkpoint / "weights.pt").is_file():
            raise OptionError("checkpoint", f"must be a folder with weights.pt or config.json, got {self.checkpoint}")
        if self.reads_text and (self.text is None or not self.text.is_file()):
            raise OptionError("text", f"must be a file for the language model to read, got {self.text}")
        if not self.reads_text and len(self.chosen("hosts")) != 1:
            raise OptionError("hosts", "must be the one mechanism that the checkpoint was trained with")

    def cases(self) -> list[dict[str, Any]]:
        """The checks, the random activations, and each model; all mechanisms are measured on the first one."""
        sizes = {name: self.chosen(name) for name in ("batch", "heads", "head_dim", "tokens")}
        config = {
            **sizes, "mechanisms": list(self.mechanisms or list_mechanisms()), "scales": sorted(self.scales),
            "seed": self.seed, "device": self.place().type,
        }  # fmt: skip
        found = [{"about": "checks", "config": config}, {"about": "random", "config": config}]
        if self.reads_text:
            files = {"checkpoint": str(self.checkpoint), "text": str(self.text)}
            return [*found, {"about": "text", "config": config | files}]
        host = {name: getattr(self, name) for name in ("data", "size", "patch_size")}
        host |= {"epochs": self.chosen("epochs"), "images": self.chosen("images")}
        host["checkpoint"] = None if self.checkpoint is None else str(self.checkpoint)
        for number, name in enumerate(self.chosen("hosts")):
            measured = config["mechanisms"] if number == 0 else []
            found.append({"about": "host", "host": name, "config": config | host | {"mechanisms": measured}})
        return found

    @staticmethod
    def measure(case: Case, work: Work) -> dict[str, Any]:
        config = case["config"]
        shape = {name: config[name] for name in ("batch", "heads", "tokens", "head_dim")}
        if case["about"] == "checks":
            random = random_activations(**shape, seed=config["seed"])
            checks = sequence_checks(config["seed"]) + attention_checks(random, config["seed"])
            return {"rows": [vars(check) for check in checks]}
        if case["about"] == "random":
            layers = [random_activations(**shape, seed=config["seed"], device=config["device"])]
        elif case["about"] == "text":
            folder, text = Path(config["checkpoint"]), Path(config["text"])
            layers = text_activations(folder, text, config["batch"], config["tokens"], config["device"])
        else:
            layers = host_activations(case["host"], config, work)
        rows = []
        for number, name in enumerate(config["mechanisms"]):
            work.tell(number / len(config["mechanisms"]), name)
            rows += [measure_layer(name, layer, config["scales"], seed=config["seed"]) for layer in layers]
        owned = [(layer.own.info.name, layer) for layer in layers if layer.own is not None]
        return {"rows": rows + [measure_layer(name, layer, config["scales"], trained=True) for name, layer in owned]}

    def wrong(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        failed = [row for row in rows if row["about"] == "checks" and not row["passed"]]
        return [f"FAIL: {row['statement']}: {row['numbers']}" for row in failed]

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        from linattn.lab.theory.entropy.figures import summary

        return summary(rows)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        from linattn.lab.theory.entropy.figures import groups_of, numbers

        shown = [[title, *row] for title, curves in groups_of(rows).items() for row in numbers(curves)]
        heads = ["activations", "mechanism", "shortest", "longest", "correlation", "as queries grow"]
        return heads, [[f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row] for row in shown]

    def figures(self, frame: "DataFrame", meta: Mapping[str, Any]) -> "list[Section]":
        from linattn.lab.theory.entropy.figures import sections

        return sections(frame)


def kind_of(pse: Sequence[float]) -> str:
    """``sharper`` or ``wider`` as queries grow, or ``blind`` if the entropy does not change.

    Example:
        >>> kind_of([4.1, 3.0, 1.0]), kind_of([2.0, 2.0001, 2.0]), kind_of([2.0, 2.1])
        ('sharper', 'blind', 'wider')
    """
    if max(pse) - min(pse) < SEEN:
        return "blind"
    return "sharper" if pse[-1] < pse[0] else "wider"


def measure_layer(
    name: str, activations: Activations, scales: Sequence[float], *, seed: int = 0, trained: bool = False
) -> dict[str, Any]:
    """One mechanism on the activations of one layer: a new one or, with ``trained``, the activations' own.

    Entropies are in nats, means over images, heads and queries: ``pse`` (positive-sequence entropy) and ``entropy`` (of
    absolute weights) at each scale, where the queries' median norm is in ``norms``. ``correlation`` is Pearson's, of
    entropy and norm of single queries at scale 1, the mean over heads; ``binned_norms`` and ``binned_pse`` are means of
    these in bins of equal size. ``keys`` is the most keys that a query sees. ``reason`` says why there are no numbers.
    """
    place = {"source": activations.source, "layer": activations.layer, "mechanism": name, "trained": trained,
             "keys": activations.k.shape[2]}  # fmt: skip
    try:
        mechanism = activations.own if trained and activations.own is not None else None
        mechanism = mechanism or fitting_mechanism(name, activations, seed)
        maps = {scale: attention_rows(mechanism, activations.times(scale)) for scale in sorted(scales)}
    except ValueError as error:  # not made for this shape or direction, or not linear in v
        return place | {"reason": str(error)}
    norm = activations.q.norm(dim=-1)[:, :, activations.counted]
    single = positive_sequence_entropy(maps[1.0])
    by_head = [r for r in entropy_norm_correlation(single, norm) if r is not None]
    order = norm.flatten().argsort()
    pse = [float(positive_sequence_entropy(weights).mean()) for weights in maps.values()]
    return place | {
        "scales": list(maps),
        "norms": [float(scale * norm.median()) for scale in maps],
        "pse": pse,
        "entropy": [float(entropy(weights).mean()) for weights in maps.values()],
        "correlation": sum(by_head) / len(by_head) if by_head else None,
        "binned_norms": [float(norm.flatten()[own].mean()) for own in order.chunk(BINS)],
        "binned_pse": [float(single.flatten()[own].mean()) for own in order.chunk(BINS)],
        "kind": kind_of(pse),
    }


def host_activations(name: str, config: Mapping[str, Any], work: Work) -> list[Activations]:
    """The layers of a vision transformer on the first test images: trained briefly for this, or read from a folder."""
    data = load_images(config["data"])
    settings = {"recipe": default_recipe(config["data"]), "epochs": config["epochs"], "seed": config["seed"]}
    recipe = TrainConfig.parse({**settings, "device": config["device"], "precision": "fp32", "compile": False})
    batches = create_batches(data, recipe, torch.device(config["device"]))
    images = next(iter(batches.test()))[0][: config["images"]]
    path = None if config["checkpoint"] is None else Path(config["checkpoint"]) / "weights.pt"
    weights = {} if path is None else torch.load(path, map_location="cpu", weights_only=True)
    torch.manual_seed(config["seed"])
    try:
        model = create_vit(
            config["size"], name, patch_size=config["patch_size"], img_size=data.image_size, in_chans=data.channels,
            num_classes=data.num_classes, global_pool="token" if "cls_token" in weights else "avg",
        )  # fmt: skip
    except ValueError as error:
        raise OptionError("hosts", f"{name} does not fit this host: {error}") from error
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            on_step = lambda epoch, *_: work.tell(epoch / config["epochs"], f"training a host on {data.name}")  # noqa: E731
            result = train(model, batches, recipe, Path(folder), on_step=on_step)
        source = f"{name} trained on {data.name}, {result.top1:.1f} %"
    else:
        source = f"{name} from {path.parent.name}"
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            fits = "does not fit the host; give its mechanism, data, size and patch size"
            raise OptionError("checkpoint", f"{path} {fits}: {error}") from error
    model = model.to(config["device"]).double().eval()
    return captured_activations(model, images.to(next(model.parameters())), source)
