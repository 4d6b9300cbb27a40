"""`linattn tour`, `mechanisms` and `doctor`: what there is, that its forms agree, and what is installed."""

import platform
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

from linattn._version import __version__
from linattn.lab.bench.benchmark import version_of
from linattn.lab.bench.problems import Problem, bind_form, draw
from linattn.lab.experiment import FAILED, RIGHT
from linattn.lab.screen import Screen
from linattn.mechanisms.registry import COLUMNS, mechanism_rows
from linattn.ops.explain import explain
from linattn.ops.linear.api import linear_attention, linear_attention_step, linear_attention_with_state
from linattn.support.config import Config
from linattn.support.extras import PACKAGES
from linattn.support.machine import cpu_name

# fp64 has 16 digits; another order of sums over a few hundred tokens loses a few of them, a wrong formula loses all.
TOLERANCE = 1e-10
FORMS, DECAYS = ("reference", "recurrent", "chunked"), ("none", "head", "token", "channel")
TOKENS = 130  # chunks are full except the last one
CUTS = ((1,), (64,), (65, 129), (7, 20, 21, 100))
Difference = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class Mechanisms(Config):
    """Show every registered mechanism and what it can do."""

    def run(self, screen: Screen) -> int:
        """Narrow columns come first, so that the text has room in a window of 80 characters."""
        rows = [dict(zip(COLUMNS, values, strict=True)) for values in mechanism_rows()]
        lines = []
        for row in rows:
            slow = "" if row["cost"] == "linear" else f", {row['cost']}"
            marks = ["x" if row[mask] == "yes" else "" for mask in ("causal", "bidirectional")]
            words = f"{row['what it is'].replace('``', '')}; {row['paper']}{slow}"
            lines.append([row["mechanism"], *marks, row["state"], words])
        title = "registered mechanisms (c: causal, b: bidirectional, state: what decoding keeps)"
        screen.table(title, ["mechanism", "c", "b", "state", "what it is"], lines)
        screen.result(rows)
        return RIGHT


@dataclass(frozen=True, kw_only=True)
class Tour(Config):
    """A tour of a minute: the mechanisms, their forms agreeing, and a sequence that is cut anywhere."""

    def run(self, screen: Screen) -> int:
        Mechanisms().run(screen)
        screen.say("One formula, three forms: the same numbers in fp64.")
        found = [pair for causal in (True, False) for decay in DECAYS for pair in compare_forms(decay, causal)]
        screen.say("Cut a sequence anywhere, hand the state over: the same output.")
        found += compare_hand_over()
        right = [difference <= TOLERANCE for _, difference in found]
        lines = [[what, f"{own:.1e}", "ok" if ok else "WRONG"] for (what, own), ok in zip(found, right, strict=True)]
        screen.table(f"largest differences (allowed: {TOLERANCE:g})", ["what", "largest difference", ""], lines)
        if not all(right):
            screen.warn("something above is WRONG")
        return RIGHT if all(right) else FAILED


@dataclass(frozen=True, kw_only=True)
class Doctor(Config):
    """Show versions, devices, what each extra brings and lacks here, and what impl="auto" would choose."""

    def run(self, screen: Screen) -> int:
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        rows = [
            ("linattn", __version__), ("python", platform.python_version()), ("torch", torch.__version__),
            ("triton", version_of("triton")),
            ("cpu", f"{cpu_name()}, {torch.get_num_threads()} threads"), ("gpu", ", ".join(gpus) or "none"),
        ]  # fmt: skip
        for extra, packages in PACKAGES.items():
            missing = [name for name in packages if find_spec(name) is None]
            lacks = f"missing {', '.join(missing)}: pip install 'linattn[{extra}]'"
            rows.append((f"extra {extra}", lacks if missing else "installed"))
        for device in ("cpu", "cuda") if gpus else ("cpu",):
            q = torch.zeros(1, 1, 2, 8, device=device)
            rows.append((f"auto on {device}", str(explain(q, q, q, causal=True))))
        screen.table("linattn doctor", ["what", "here"], rows)
        screen.result(dict(rows))
        return RIGHT


def compare_forms(decay: str, causal: bool) -> list[Difference]:
    """The largest difference between any two forms, in values and in gradients."""
    problem = Problem("tour", "attention", 2, 2, TOKENS, 8, 8, causal=causal, decay=decay, normalized=True)
    tensors, grad = draw(problem, torch.device("cpu"), torch.float64, seed=0)
    found = [bind_form(form)(problem, tensors).values(grad) for form in FORMS]
    differences = {name: spread_of([results[name] for results in found]) for name in found[0]}
    what = f"{'causal' if causal else 'bidirectional'}, decay {decay}"
    return [(f"{what}: values", differences.pop("output")), (f"{what}: gradients", max(differences.values()))]


def compare_hand_over() -> list[Difference]:
    """Compare a causal sequence with a decay per token to its pieces of several sizes, and to single tokens."""
    problem = Problem("tour", "attention", 2, 2, TOKENS, 8, 8, decay="token", normalized=True)
    tensors, _ = draw(problem, torch.device("cpu"), torch.float64, seed=0)
    q, k, v, decay = (tensors[name] for name in ("q", "k", "v", "log_decay"))
    whole, found = linear_attention(q, k, v, causal=True, log_decay=decay), list[Difference]()
    for cuts in CUTS:
        outputs, state = [], None
        for start, stop in pairwise((0, *cuts, TOKENS)):
            part = [x[:, :, start:stop] for x in (q, k, v, decay)]
            output, state = linear_attention_with_state(
                part[0], part[1], part[2], causal=True, log_decay=part[3], initial_state=state
            )
            outputs.append(output)
        found.append((f"cut at {', '.join(map(str, cuts))}", spread_of([whole, torch.cat(outputs, dim=2)])))
    outputs, state = [], None
    for t in range(TOKENS):
        output, state = linear_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], state, log_decay=decay[:, :, t])
        outputs.append(output)
    return [*found, ("token by token", spread_of([whole, torch.stack(outputs, dim=2)]))]


def spread_of(tensors: list[Tensor]) -> float:
    """Largest difference between any two tensors; a NaN anywhere gives NaN, which no tolerance admits."""
    stacked = torch.stack(tensors)
    return (stacked.amax(0) - stacked.amin(0)).max().item()
