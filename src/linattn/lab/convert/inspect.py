"""The command ``linattn inspect``: what the attention of a pretrained model is like, and what could take its place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from linattn.convert.adapters.families import convertible_sites
from linattn.convert.inspect import STATE_LENGTH, InspectOptions, inspect
from linattn.convert.training.data import batched, check_positions, read_text, suited_length
from linattn.convert.training.loop import Batch
from linattn.lab.convert.folder import Pretrained, documents, load_tokenizer, named, sketch
from linattn.lab.screen import Screen
from linattn.support.config import as_json, option
from linattn.support.extras import need
from linattn.support.files import write_json
from linattn.support.machine import describe_run
from linattn.support.options import OptionError, check_folder

LONGEST = 512  # tokens of a sequence by default
Layer = Mapping[str, Any]
# Title, decimals, and a layer's number. Entropy in nats: how widely a token spreads its attention; even: over all keys
# alike. Far: weight beyond the window without the first four tokens, which are the sinks. Free: degrees of freedom of
# the exponential kernel on the layer's queries and keys, the mean over its heads, and the most of one: about as many
# features it takes. Dim: features of each layer if the same number is given out in proportion. Missed: by what fits.
COLUMNS: list[tuple[str, int, Callable[[Layer], float]]] = [
    ("entropy", 2, lambda layer: mean(layer["entropy"])),
    ("even", 2, lambda layer: layer["even_entropy"]),
    ("|q|", 2, lambda layer: mean(layer["q_norm"])),
    ("|k|", 2, lambda layer: mean(layer["k_norm"])),
    ("far %", 1, lambda layer: 100 * mean(layer["far"])),
    ("sinks %", 1, lambda layer: 100 * mean(layer["sinks"])),
    ("free", 1, lambda layer: mean(layer["degrees_of_freedom"])),
    ("most", 1, lambda layer: max(layer["degrees_of_freedom"])),
    ("dim", 0, lambda layer: layer["dimension"]),
    ("missed", 4, lambda layer: next(fit["missed"] for fit in layer["fits"] if fit["name"] == layer["choice"])),
]


@dataclass(frozen=True, kw_only=True)
class Inspect(InspectOptions, Pretrained):
    """Look at a pretrained model's attention: how sharp it is, how far it looks, what could take its place.

    The model is not changed and nothing of it is kept; `linattn linearize` converts it.

    Exit code: 0 all right, 2 a bad option, 130 interrupted.
    """

    length: int = option(0, "Tokens of a sequence; 0: the model's, to 512.", least=0)
    batch_size: int = option(2, "Sequences read at a time.", least=1)
    held_out: int = option(4, "Sequences that figures are measured on.", least=1)
    output: Path | None = option(None, "Folder of the report.", affects=False, default_text="runs/inspect/<model>")

    def check(self) -> None:
        if not self.text:
            raise OptionError("text", "must name what the model reads: a file, a folder of .txt files, or .jsonl")
        if self.length == 1:
            raise OptionError("length", "must be at least 2 tokens, or 0: the model's own, got 1")

    def run(self, screen: Screen) -> int:
        need("linattn inspect", "transformers", "safetensors")
        name, device, model = self.model.resolve().name, self.place(), sketch(self.model)
        folder = self.output or Path("runs/inspect") / name
        check_folder("output", folder)
        with named("model"):
            convertible_sites(model)
        check_positions(model, "length", self.length)
        for source in self.text:
            documents("text", source)
        length = self.length or suited_length(model, LONGEST)
        text = read_text(list(self.text), load_tokenizer(self.model))
        batches = text.batches(self.batch_size, length, self.seed)
        held_out: list[Batch] = list(batched(text.windows(length, self.held_out), 1))
        with screen.progress(self.steps + len(held_out)) as bar:
            progress = lambda done, total, words: bar.show(done, words)  # noqa: E731
            layers = inspect(self.load(), batches, held_out, self, progress=progress)
        meta = describe_run(device) | {"model": name, "config": self.values(affecting=True) | {"length": length}}
        results = as_json({"meta": meta, "layers": layers})
        write_json(folder / "inspect.json", results)
        titles = ["layer", *(title for title, _, _ in COLUMNS), "fits"]
        rows = [[str(layer["layer"]), *(f"{number(layer):.{digits}f}" for _, digits, number in COLUMNS),
                 layer["choice"]] for layer in layers]  # fmt: skip
        screen.table(name, titles, rows)
        learned = f"after {self.steps} steps of training each" if self.steps else "untrained"
        screen.table(f"The share of the softmax output that each candidate misses, {learned}", *candidates(layers))
        screen.say(f"numbers {folder / 'inspect.json'}")
        screen.result(results)
        return 0


def candidates(layers: Sequence[Layer]) -> tuple[list[str], list[list[object]]]:
    """What each candidate misses, with a dot at the one that fits; 0 is exact, 1 is as bad as no output. The state is
    that of the first layer, in numbers."""
    rows: dict[str, list[object]] = {fit["name"]: [fit["name"], fit["state"]] for fit in layers[0]["fits"]}
    for layer in layers:
        for fit in layer["fits"]:
            rows[fit["name"]].append(f"{fit['missed']:.4f}" + " ●" * (fit["name"] == layer["choice"]))
    titles = ["candidate", f"state after {STATE_LENGTH:,} tokens", *(f"layer {layer['layer']}" for layer in layers)]
    return titles, list(rows.values())
