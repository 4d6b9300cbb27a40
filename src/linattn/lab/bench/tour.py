"""`linattn tour`, `mechanisms` and `doctor`: what there is, that its forms agree, and what is installed."""

import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn._version import __version__
from linattn.lab.bench.attention import Attention
from linattn.lab.bench.contenders import (
    FORWARD,
    SDPA,
    Inputs,
    evaluate,
    gradient_of_output,
    make_contenders,
    make_inputs,
)  # fmt: skip
from linattn.lab.bench.fit import crossover, steady, times_by
from linattn.lab.experiment import FAILED, RIGHT, load_results
from linattn.lab.screen import Screen
from linattn.mechanisms.registry import COLUMNS, mechanism_rows
from linattn.ops.explain import explain
from linattn.ops.linear.api import linear_attention, linear_attention_step, linear_attention_with_state
from linattn.ops.maps import EluPlusOne
from linattn.support.config import Config, option
from linattn.support.machine import cpu_name

# fp64 has 16 digits; another order of sums over a few hundred tokens loses a few of them, a wrong formula loses all.
TOLERANCE = 1e-10
FORMS = ("reference", "recurrent", "chunked")
TOKENS = 130  # chunks are full except the last one
CUTS = ((1,), (64,), (65, 129), (7, 20, 21, 100))
Difference = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class Mechanisms(Config):
    """Show every registered mechanism and what it can do."""

    def run(self, screen: Screen) -> int:
        show_mechanisms(screen)
        screen.result([dict(zip(COLUMNS, row, strict=True)) for row in mechanism_rows()])
        return RIGHT


@dataclass(frozen=True, kw_only=True)
class Tour(Config):
    """A tour of a minute or two: the mechanisms, their forms agreeing, and linear against softmax attention."""

    output: Path = option(Path("runs/tour"), "Folder of the chart and the results.", affects=False)
    lengths: tuple[int, ...] = option(
        (64, 128, 256, 512, 1024, 2048, 4096, 8192), "Lengths of the race, with commas.", least=1
    )  # fmt: skip

    def run(self, screen: Screen) -> int:
        show_mechanisms(screen)
        screen.say("One formula, three forms: the same numbers in fp64.")
        agreements = [found for causal in (True, False) for decay in DECAYS for found in compare_forms(decay, causal)]
        _show(screen, "largest difference of reference, recurrent, chunked", agreements)
        screen.say("Cut a sequence anywhere, hand the state over: the same output.")
        hand_overs = compare_hand_over()
        _show(screen, f"causal, decay per token, {TOKENS} tokens: parts against the whole", hand_overs)
        screen.say("Softmax against linear attention, forward.")
        race = Attention(
            output=self.output, lengths=self.lengths, impl=("chunked", "reference"), backward=False, quick=True,
            max_seconds=1.0,
        )  # fmt: skip
        code = race.run(screen)
        rows = load_results(race.folder / "results.json")["rows"]
        times = [times_by(steady(rows), "length", contender=own, pass_name=FORWARD) for own in (SDPA, "chunked")]
        screen.say(crossover_sentence(*times))
        if not all(difference <= TOLERANCE for _, difference in (*agreements, *hand_overs)):
            screen.warn("something above is WRONG")
            return FAILED
        return code


@dataclass(frozen=True, kw_only=True)
class Doctor(Config):
    """Show versions, devices, what each extra brings and lacks here, and what impl="auto" would choose."""

    def run(self, screen: Screen) -> int:
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        rows = [
            ("linattn", __version__), ("python", platform.python_version()), ("torch", torch.__version__),
            ("triton", installed("triton") or "not installed"),
            ("cpu", f"{cpu_name()}, {torch.get_num_threads()} threads"), ("gpu", ", ".join(gpus) or "none"),
        ]  # fmt: skip
        for extra, packages in extras().items():
            missing = [name for name in packages if not installed(name)]
            lacks = f"missing {', '.join(missing)}: pip install 'linattn[{extra}]'"
            rows.append((f"extra {extra}", lacks if missing else "installed"))
        for device in ("cpu", "cuda") if gpus else ("cpu",):
            q = torch.zeros(1, 1, 2, 8, device=device)
            rows.append((f"auto on {device}", str(explain(q, q, q, causal=True))))
        screen.table("linattn doctor", ["what", "here"], rows)
        screen.result(dict(rows))
        return 0


def installed(package: str) -> str:
    """The version of a package; empty if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def extras() -> dict[str, list[str]]:
    """The packages of each extra, as the metadata of the installed library lists them."""
    names = distribution("linattn").metadata.get_all("Provides-Extra") or []
    found: dict[str, list[str]] = {name: [] for name in names}
    for requirement in requires("linattn") or []:
        package = re.split(r"[\s\[<>=!~;(]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
        if extra and package != "linattn":
            found.setdefault(extra.group(1), []).append(package)
    return {name: packages for name, packages in found.items() if packages}


DECAYS = ("none", "head", "token", "channel")


def show_mechanisms(screen: Screen) -> None:
    """The registry, with narrow columns first, so that the text has room in a window of 80 characters."""
    lines = []
    for values in mechanism_rows():
        row = dict(zip(COLUMNS, values, strict=True))
        slow = "" if row["cost"] == "linear" else f", {row['cost']}"
        marks = ["x" if row[mask] == "yes" else "" for mask in ("causal", "bidirectional")]
        lines.append(
            [row["mechanism"], *marks, row["state"], f"{row['what it is'].replace('``', '')}; {row['paper']}{slow}"]
        )
    title = "registered mechanisms (c: causal, b: bidirectional, state: what decoding keeps)"
    screen.table(title, ["mechanism", "c", "b", "state", "what it is"], lines)


def compare_forms(decay: str, causal: bool) -> list[Difference]:
    """The largest difference between any two forms, in values and in gradients."""
    config = _small(decay, causal)
    inputs = make_inputs(config, TOKENS)
    grad = gradient_of_output(inputs, config.seed)
    found = [
        evaluate(own.run, inputs.copies(requires_grad=True), own.uses, grad)
        for own in make_contenders(config) if own.name in FORMS
    ]  # fmt: skip
    differences = {name: spread_of([results[name] for results in found]) for name in found[0]}
    values = differences.pop("output")
    what = f"{'causal' if causal else 'bidirectional'}, decay {decay}"
    return [(f"{what}: values", values), (f"{what}: gradients", max(differences.values()))]


def compare_hand_over() -> list[Difference]:
    """Compare a causal sequence with a decay per token to its pieces of several sizes, and to single tokens."""
    inputs = make_inputs(_small("token", causal=True), TOKENS)
    q, k, v, decay = inputs.q, inputs.k, inputs.v, inputs.log_decay
    assert decay is not None
    whole = linear_attention(q, k, v, causal=True, log_decay=decay, feature_map=EluPlusOne())
    found = [("cut at " + ", ".join(map(str, cuts)), spread_of([whole, _in_parts(inputs, cuts)])) for cuts in CUTS]
    outputs, state = [], None
    for t in range(TOKENS):
        output, state = linear_attention_step(
            q[:, :, t], k[:, :, t], v[:, :, t], state, log_decay=decay[:, :, t], feature_map=EluPlusOne()
        )
        outputs.append(output)
    return [*found, ("token by token", spread_of([whole, torch.stack(outputs, dim=2)]))]


def _in_parts(inputs: Inputs, cuts: tuple[int, ...]) -> Tensor:
    outputs, state = [], None
    for start, stop in pairwise((0, *cuts, TOKENS)):
        assert inputs.log_decay is not None
        q, k, v, decay = (x[:, :, start:stop] for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
        output, state = linear_attention_with_state(
            q, k, v, causal=True, log_decay=decay, feature_map=EluPlusOne(), initial_state=state
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def _small(decay: str, causal: bool) -> Attention:
    kind: Any = {"causal": causal, "decay": decay, "dtype": "float64", "device": "cpu"}
    return Attention(impl=FORMS, batch=2, heads=2, head_dim=8, **kind)


def spread_of(tensors: list[Tensor]) -> float:
    """Largest difference between any two tensors; a NaN anywhere gives NaN, which no tolerance admits."""
    stacked = torch.stack(tensors)
    return (stacked.amax(0) - stacked.amin(0)).max().item()


def _show(screen: Screen, title: str, found: list[Difference]) -> None:
    words = [[name, f"{difference:.1e}", "ok" if difference <= TOLERANCE else "WRONG"] for name, difference in found]
    screen.table(f"{title} (allowed: {TOLERANCE:g})", ["what", "largest difference", ""], words)


def crossover_sentence(softmax: dict[int, float], linear: dict[int, float]) -> str:
    """From which length on the chunked form is faster than softmax attention, by milliseconds by length."""
    both = sorted(softmax.keys() & linear.keys())
    if not both:
        return "No length was measured for both, so there is no crossover to tell."
    point, gain = crossover(softmax, linear), softmax[both[-1]] / linear[both[-1]]
    if point is None:
        return f"Softmax attention is the faster one up to T = {both[-1]} ({1 / gain:.1f}x there)."
    if point == both[0]:
        return f"Linear attention is faster at every length from T = {both[0]}; {gain:.1f}x at {both[-1]}."
    return f"Linear attention becomes faster at T = {point:.0f}, and is {gain:.1f}x faster at {both[-1]}."
