"""Candidates for a layer's attention, trained for a few steps beside the model and measured on other text."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linattn.convert.layer.attention import Observation
from linattn.convert.layer.core import Core, build_core
from linattn.convert.plan import LayerPlan, LayerShape, plan
from linattn.convert.training.losses import output_error, relative_error
from linattn.ops.hybrid.rows import count_numbers
from linattn.ops.hybrid.types import Window
from linattn.support.options import OptionError
from linattn.support.schedule import warmed_cosine

# Name -> (method of `linattn linearize`, its options). Those with a window need a causal model.
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("still", {"features": "none", "ratio": None}),
    "window+salient": ("still", {"features": "none"}),
    "still": ("still", {}),
    "lolcats": ("lolcats", {}),
    "hedgehog": ("hedgehog", {}),
    "t2r": ("t2r", {}),
    "elu": ("features", {"mechanism": "elu"}),
    "mirror": ("features", {"mechanism": "mirror"}),
}
WINDOWED = ("window", "window+salient", "still", "lolcats")
STATE_LENGTH = 4096  # tokens at which states that grow are compared
NEAR = 1.1  # a cheaper candidate is taken if it misses at most this many times what the best one misses
SMALL = 0.01  # or if it misses less than this share of the output

Fit = dict[str, Any]
"""``{"name", "missed", "state"}``: the share of the softmax output that a candidate fails to give on held-out text, and
how many numbers one sequence of 4,096 tokens leaves in the layer's cache (softmax: ``2 T D`` per key head)."""


def choose(fits: list[Fit]) -> Fit:
    """Choose the smallest state among the candidates that miss hardly more than the best one.

    Example:
        >>> rows = [("window", 0.109, 10), ("still", 0.1, 50), ("lolcats", 0.5, 30)]
        >>> choose([{"name": name, "missed": missed, "state": state} for name, missed, state in rows])["name"]
        'window'
    """
    most = max(NEAR * min(fit["missed"] for fit in fits), SMALL)
    return min((fit for fit in fits if fit["missed"] <= most), key=lambda fit: (fit["state"], fit["missed"]))


class Fitter:
    """Trains and measures the candidates of every layer, each with an optimiser of its own."""

    def __init__(
        self, shapes: Mapping[int, LayerShape], candidates: tuple[str, ...] | None, *, window: int, lr: float,
        steps: int, seed: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.lr, self.steps = lr, steps
        self.sums: dict[tuple[int, str], Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.cores = {index: make_cores(shape, candidates, window, device) for index, shape in shapes.items()}
        self.optimizers = {
            (index, name): torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
            for index, cores in self.cores.items()
            for name, core in cores.items()
            if (parameters := list(core.parameters()))
        }

    def learn(self, seen: Observation, step: int) -> None:
        """Make one step of each candidate for a layer."""
        rate = warmed_cosine(step, self.steps, max(1, self.steps // 20), self.lr, self.lr / 10)
        for name, core in self.cores[seen.layer_idx].items():
            optimizer = self.optimizers.get((seen.layer_idx, name))
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                group["lr"] = rate
            relative_error(core, _in_fp32(seen)).backward()
            nn.utils.clip_grad_norm_(core.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def measure(self, seen: Observation) -> None:
        """Add what the candidates miss on one observation of a layer."""
        for name, core in self.cores[seen.layer_idx].items():
            parts = torch.stack([part.sum() for part in output_error(core, _in_fp32(seen))]).double().cpu()
            self.sums[seen.layer_idx, name] = self.sums.get((seen.layer_idx, name), 0) + parts

    def fits(self, index: int) -> list[Fit]:
        rows = []
        for name, core in self.cores[index].items():
            missed, size = self.sums[index, name].tolist()
            rows.append({"name": name, "missed": missed / max(size, 1e-30), "state": state_numbers(core)})
        return rows


def _in_fp32(seen: Observation) -> Observation:
    q, k, v, x, output = (tensor.float() for tensor in (seen.q, seen.k, seen.v, seen.x, seen.output))
    return Observation(seen.layer_idx, q, k, v, x, seen.key_mask, output)


def make_cores(shape: LayerShape, wanted: tuple[str, ...] | None, window: int, device: torch.device) -> dict[str, Core]:
    """The candidates by name; those with a window are left out of a bidirectional layer, unless they are wanted."""
    cores: dict[str, Core] = {}
    for name in wanted or CANDIDATES:
        method, options = CANDIDATES[name]
        if name in WINDOWED and not shape.causal:
            if wanted:
                raise OptionError("candidates", f"{name} has a window of past tokens, the model is bidirectional")
            continue
        if name in WINDOWED:
            options = options | {"window": window}
        cores[name] = build_core(plan(method, [shape], **options).layers[0], shape).to(device)
    return cores


def state_numbers(core: Any) -> int:
    """How many numbers the state holds after a call over 4,096 tokens; for a bidirectional layer, those of its sums.

    Everything is counted: keys, values and features of the window and of the chosen tokens, their scores, positions and
    marks, and the sums. Decoding uses another layout of the state, with room for further tokens and for the queries of
    the latest chunk, which takes twice as much memory or a little more.
    """
    layer: LayerPlan = core.plan
    shape: LayerShape = core.shape
    if layer.kind == "mechanism":
        return int(core.mechanism.state_size(STATE_LENGTH))
    D, F = shape.head_dim, 0
    if core.features is not None:
        probe = torch.zeros(1, shape.num_heads, 1, D, device=next(core.parameters()).device)
        F = core.features(probe, probe[:, : shape.num_kv_heads])[1].shape[-1]
    if layer.window == 0:
        return shape.num_kv_heads * F * (D + 1)
    window = Window(layer.window, layer.layout, layer.delay)
    return count_numbers(window, layer.budget, heads=shape.num_kv_heads, widths=(D, D, F), length=STATE_LENGTH)
