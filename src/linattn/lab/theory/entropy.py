"""``linattn lab entropy``: how spread out attention is, and whether it sees the length of its queries."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.analysis.capture import capture
from linattn.analysis.entropy import entropy, entropy_norm_correlation, positive_sequence_entropy
from linattn.lab.cases import Case, Work
from linattn.lab.convert.curves import chart
from linattn.lab.page import Section
from linattn.lab.page.numbers import listed
from linattn.lab.tasks.load import load_images
from linattn.lab.theory import theorems
from linattn.lab.theory.laboratory import Laboratory, sized
from linattn.lab.theory.theorems import Activations, attention_rows, random_activations
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig, default_recipe
from linattn.lab.train.loop import train
from linattn.mechanisms.registry import list_mechanisms
from linattn.models.vision import SIZES, create_vit
from linattn.support.config import option
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Mapping[str, Any]
SCALES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
HOSTS = ("softmax", "relu", "pola", "nala", "mirror")
KINDS = {"sharper": "Sharper as queries grow", "blind": "Blind to the norm", "wider": "Wider as queries grow"}
GROUPS = {
    "Random activations": "Each mechanism as it starts, on the same random queries and keys.",
    "Real activations": "The same on the queries and keys of a model.",
    "As trained": "Each mechanism in a host that was trained with it.",
}
NORMS = (
    " All queries are made longer together, and nothing else changes; across: their median norm. Low: a query looks at "
    "few keys. Dotted: even attention. Means over layers, heads and queries."
)
UNITS = (
    "Positive-sequence entropy in nats, and Pearson's correlation, over single queries, of a row's entropy and norm."
)


@dataclass(frozen=True, kw_only=True)
class Entropy(Laboratory):
    """Attention entropy and the norm of queries.

    Theorems of NaLaFormer, PolaFormer and MirrorLA are checked first. Then the queries are made longer and shorter, on
    random activations and on those of trained models, and the entropy of the rows of attention is measured for every
    mechanism. Exit code 1: a check failed.
    """

    name = "lab-entropy"
    mechanisms: tuple[str, ...] = option(
        (), "Mechanisms to measure.", choices=list_mechanisms, default_text="all that are registered", group="What"
    )
    hosts: tuple[str, ...] = sized(
        HOSTS, HOSTS[:1], "Mechanisms to train a small vision transformer with; all mechanisms get the activations of "
        "the first one. Nothing: random activations alone.", group="What",
        choices=lambda: list_mechanisms(bidirectional=True),
    )  # fmt: skip
    scales: tuple[float, ...] = option(
        SCALES, "Factors of all queries, 1 among them.", above=0, group="What", rare=True
    )
    data: str = option("digits", "Data of the hosts, as for `linattn train images`.", group="Models")
    size: str = option("digits", "Size of the hosts.", choices=tuple(SIZES), group="Models")
    patch_size: int = option(2, "Pixels of a token's side.", least=1, group="Models")
    epochs: int = sized(10, 1, "Epochs that a host is trained for.", least=1, group="Models")
    images: int = sized(32, 4, "Test images to look at.", least=1, group="Models")
    batch: int = sized(2, 1, "Sequences of random activations.", least=1, group="Sizes")
    heads: int = sized(4, 2, "Heads of random activations.", least=1, group="Sizes")
    head_dim: int = sized(32, 16, "Width of a head of random activations.", least=1, group="Sizes")
    tokens: int = sized(64, 32, "Tokens of random activations.", least=8, group="Sizes")
    seed: int = option(0, "Seed of activations, weights and training.", least=0)

    def check(self) -> None:
        if self.head_dim % 2:
            raise OptionError("head_dim", f"must be even, since mirrors turn pairs of channels, got {self.head_dim}")
        if 1.0 not in self.scales or len(self.scales) < 2:
            raise OptionError("scales", f"must be numbers above 0, 1 and another one among them, got {self.scales}")

    def cases(self) -> list[dict[str, Any]]:
        """The checks, the random activations, and each model; all mechanisms are measured on the first one."""
        config = {name: getattr(self, name) for name in ("batch", "heads", "head_dim", "tokens", "seed")} | {
            "mechanisms": list(self.mechanisms or list_mechanisms()), "scales": sorted(self.scales),
            "device": self.place().type,
        }  # fmt: skip
        found = [{"about": "checks", "config": config}, {"about": "random", "config": config}]
        config = config | {name: getattr(self, name) for name in ("data", "size", "patch_size", "epochs", "images")}
        hosts = [{"about": "host", "host": name, "config": config | ({"mechanisms": []} if number else {})}
                 for number, name in enumerate(self.hosts)]  # fmt: skip
        return found + hosts

    @staticmethod
    def measure(case: Case, work: Work) -> dict[str, Any]:
        config, about = case["config"], case["about"]
        shape = {name: config[name] for name in ("batch", "heads", "tokens", "head_dim", "seed")}
        if about == "checks":
            return {"rows": theorems.check_all(random_activations(**shape), config["seed"])}
        if about == "random":
            layers = [random_activations(**shape, device=config["device"])]
        else:
            layers = host_activations(case["host"], config, work)
        rows = []
        for number, name in enumerate(config["mechanisms"]):
            work.tell(number / len(config["mechanisms"]), name)
            rows += [measure_layer(name, layer, config["scales"], seed=config["seed"]) for layer in layers]
        owned = [(layer.own.info.name, layer) for layer in layers if layer.own is not None]
        return {"rows": rows + [measure_layer(name, layer, config["scales"], trained=True) for name, layer in owned]}

    def wrong(self, rows: Sequence[Row]) -> list[str]:
        failed = [row for row in rows if row["about"] == "checks" and not row["passed"]]
        return [f"FAIL: {row['statement']}: {row['numbers']}" for row in failed]

    def sentences(self, rows: Sequence[Row]) -> list[str]:
        checks = [bool(row["passed"]) for row in rows if row["about"] == "checks"]
        said = [f"{sum(checks)} of {len(checks)} checks hold."]
        for title, own in groups_of(rows).items():
            blind = [name for name, curve in own.items() if kind_of(curve["pse"]) == "blind"]
            if title != "As trained":
                who = listed(blind) if blind else "none"
                said.append(f"{title}: {len(blind)} of {len(own)} are blind to the norm of the query: {who}.")
        return said

    def table(self, rows: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
        """Entropies of the shortest and of the longest queries, their correlation with the norm, and what it makes of
        longer ones, or why a mechanism was left out."""
        shown: list[list[object]] = [
            [title, name, *("" if n is None else f"{n:.3f}" for n in (c["pse"][0], c["pse"][-1], c["correlation"])),
             kind_of(c["pse"])]
            for title, curves in groups_of(rows).items() for name, c in curves.items()
        ]  # fmt: skip
        left = [row for row in rows if isinstance(row.get("reason"), str)]
        shown += [[row["source"], row["mechanism"], "", "", "", row["reason"]] for row in left]
        return ["activations", "mechanism", "shortest", "longest", "correlation", "as queries grow"], shown

    def figures(self, frame: "DataFrame", meta: Row) -> list[Section]:
        rows, table = frame.to_dict("records"), type(frame)
        said = [[row["statement"], row["kind"], "pass" if row["passed"] else "FAIL", ", ".join(
                 f"{name}: {value:.4g}" for name, value in row["numbers"].items())]
                for row in rows if row["about"] == "checks"]  # fmt: skip
        charts = [section for title, curves in groups_of(rows).items() for section in norms_chart(title, curves)]
        names, numbers = self.table(rows)
        return [
            Section("Theorems, checked", table=table(said, columns=["statement", "kind", "verdict", "numbers"])),
            *charts,
            Section("Numbers", UNITS, table(numbers, columns=names)),
        ]


def kind_of(pse: Sequence[float]) -> str:
    """``sharper`` or ``wider`` as queries grow, or ``blind`` if the entropy does not change.

    Example:
        >>> kind_of([4.1, 3.0, 1.0]), kind_of([2.0, 2.0001, 2.0]), kind_of([2.0, 2.1])
        ('sharper', 'blind', 'wider')
    """
    if max(pse) - min(pse) < theorems.SEEN:
        return "blind"
    return "sharper" if pse[-1] < pse[0] else "wider"


def measure_layer(
    name: str, activations: Activations, scales: Sequence[float], *, seed: int = 0, trained: bool = False
) -> dict[str, Any]:
    """One mechanism on the activations of one layer: a new one or, with ``trained``, the activations' own.

    Entropies are in nats, means over images, heads and queries: ``pse`` (positive-sequence entropy) and ``entropy`` (of
    absolute weights) at each scale, where the queries' median norm is in ``norms``. ``correlation`` is Pearson's, of
    entropy and norm of single queries at scale 1, the mean over heads. ``keys`` is the number of keys.
    ``reason`` says why there are no numbers.
    """
    place = {"source": activations.source, "layer": activations.layer, "mechanism": name, "trained": trained,
             "keys": activations.k.shape[2]}  # fmt: skip
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = theorems.build(name, activations, input_dim=activations.arguments["x"].shape[-1])
        mechanism = (trained and activations.own) or made
        maps = {scale: attention_rows(mechanism, activations.times(scale)) for scale in sorted(scales)}
    except ValueError as error:  # not made for this shape, or not linear in v
        return place | {"reason": str(error)}
    norm = activations.q.norm(dim=-1)
    by_head = [r for r in entropy_norm_correlation(positive_sequence_entropy(maps[1.0]), norm) if r is not None]
    pse = [float(positive_sequence_entropy(weights).mean()) for weights in maps.values()]
    return place | {
        "scales": list(maps),
        "norms": [float(scale * norm.median()) for scale in maps],
        "pse": pse,
        "entropy": [float(entropy(weights).mean()) for weights in maps.values()],
        "correlation": sum(by_head) / len(by_head) if by_head else None,
        "kind": kind_of(pse),
    }


def captured_activations(model: nn.Module, inputs: Tensor, source: str) -> list[Activations]:
    """What the mechanisms of ``model`` are called with, layer by layer, with the inputs of the layers around them."""
    found = []
    for call in capture(model, inputs):
        arguments = call.map_arguments()
        arguments["x"] = call.inputs if arguments["x"] is None else arguments["x"]
        found.append(Activations(source, call.name, call.q, call.k, arguments, call.mechanism))
    return found


def host_activations(name: str, config: Row, work: Work) -> list[Activations]:
    """The layers of a vision transformer, which is trained briefly for this, on the first test images."""
    data = load_images(config["data"])
    settings = {"recipe": default_recipe(config["data"]), "epochs": config["epochs"], "seed": config["seed"]}
    recipe = TrainConfig.parse({**settings, "device": config["device"], "precision": "fp32", "compile": False})
    batches = create_batches(data, recipe, torch.device(config["device"]))
    images = next(iter(batches.test()))[0][: config["images"]]
    torch.manual_seed(config["seed"])
    model = create_vit(
        config["size"], name, patch_size=config["patch_size"], img_size=data.image_size, in_chans=data.channels,
        num_classes=data.num_classes, global_pool="avg",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        on_step = lambda epoch, *_: work.tell(epoch / config["epochs"], f"training a host on {data.name}")  # noqa: E731
        result = train(model, batches, recipe, Path(folder), on_step=on_step)
    model = model.to(config["device"]).double().eval()
    source = f"{name} trained on {data.name}, {result.top1:.1f} %"
    return captured_activations(model, images.to(next(model.parameters())), source)


def groups_of(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Means over layers, on random activations, on those of the first model, and as mechanisms were trained."""
    found: dict[str, dict[str, list[Row]]] = {title: {} for title in GROUPS}
    for row in rows:
        if row["about"] != "checks" and isinstance(row.get("pse"), list):
            title = "Random activations" if row["about"] == "random" else "Real activations"
            found["As trained" if row["trained"] else title].setdefault(row["mechanism"], []).append(row)
    return {title: {name: _mean(layers) for name, layers in own.items()} for title, own in found.items() if own}


def _mean(layers: Sequence[Row]) -> Row:
    known = [r for row in layers if (r := row["correlation"]) is not None and r == r]  # in a frame None is NaN
    means = {key: [fmean(each) for each in zip(*(row[key] for row in layers), strict=True)] for key in ("norms", "pse")}
    return means | {"correlation": fmean(known) if known else None, "keys": layers[0]["keys"]}


def norms_chart(title: str, curves: Mapping[str, Row]) -> list[Section]:
    """Entropies against norms, in a panel for each kind."""
    even = log(max(curve["keys"] for curve in curves.values()))
    panels: list[Any] = []
    for kind, heading in KINDS.items():
        own = {name: curve for name, curve in curves.items() if kind_of(curve["pse"]) == kind}
        lines = {name: list(zip(c["norms"], c["pse"], strict=True)) for name, c in own.items()}
        ends = sorted((norm, even) for c in own.values() for norm in c["norms"])
        rule = {"limits": (-0.05, 1.05 * even), "dotted": [[ends[0], ends[-1]]] if ends else []}
        panels.append((f"{heading}: PSE, nats", "median norm of the queries", lines, rule))
    name = title.split()[-1 if title.startswith("As") else 0].lower()
    return chart(f"entropy-{name}", title, GROUPS[title] + NORMS, *panels)
