"""Diagnosis of a pretrained model: its attention, layer by layer, and which candidates could replace it.

Candidates are trained for a few steps beside the model and measured on other text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linattn.analysis.entropy import entropy
from linattn.convert.adapters.families import convertible_sites
from linattn.convert.convert import Observation
from linattn.convert.core import Core, build_core
from linattn.convert.degrees.kernel import kernel_degrees
from linattn.convert.degrees.measure import Reservoir, allocate, watch
from linattn.convert.plan import LayerShape, plan
from linattn.convert.training.loop import Batch, Batches
from linattn.convert.transfer import output_error, relative_error
from linattn.support.config import Config, option
from linattn.support.options import OptionError
from linattn.support.progress import Report
from linattn.support.schedule import warmed_cosine

SINKS = 4  # first tokens, which many models attend to when nothing else matters
DRAWS = 2
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
STATE_LENGTH = 4096  # tokens at which states that grow are compared
NEAR = 1.1  # a cheaper candidate is taken if it misses at most this many times what the best one misses
SMALL = 0.01  # or if it misses less than this share of the output

Fit = dict[str, Any]
"""``{"name", "missed", "state"}``: the share of the softmax output that a candidate fails to give on held-out text, and
how many numbers one sequence of 4,096 tokens leaves in the layer's cache (softmax: ``2 T D`` per key head)."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Config):
    """Options of a diagnosis."""

    window: int = option(64, "Tokens that count as near.", least=1)
    steps: int = option(20, "Steps that each candidate is trained for; 0: compared as it starts.", least=0)
    lr: float = option(1e-2, "Highest learning rate of these.", above=0)
    candidates: tuple[str, ...] | None = option(
        None, "Candidates to take softmax's place, with commas.", choices=CANDIDATES, default_text="all that suit"
    )
    tolerance: float = option(
        2**-8, "Tolerance of the degrees of freedom, in units of the largest eigenvalue; a smaller one counts more of "
        "them.", above=0,
    )  # fmt: skip
    points: int = option(512, "Queries and keys that these are measured on.", least=8)
    cost: int | None = option(None, "Mean dimension that layers share.", least=1, default_text="the head's")
    seed: int = option(0, "Seed of the draws.", least=0)


def inspect(
    model: nn.Module,
    batches: Batches,
    held_out: Sequence[Batch],
    options: InspectOptions | None = None,
    *,
    progress: Report | None = None,
) -> list[dict[str, Any]]:
    """Diagnose every layer that could be converted; the model itself does not change.

    Args:
        batches: training batches by the number of the step, which candidates are trained on.
        held_out: batches that figures and errors are measured on.
        progress: called with batches done, batches in all, and words.

    Returns:
        For each layer its number ``layer``; the figures of :meth:`Statistics.figures`; ``fits``, what each candidate
        misses and how large its state is; the ``choice`` among them; and the ``dimension`` that it gets of the budget.
    """
    options = options or InspectOptions()
    shapes = {index: site.shape for index, site in convertible_sites(model).items()}
    fitter = Fitter(shapes, options, next(model.parameters()).device)
    statistics = {index: Statistics(shape, options) for index, shape in shapes.items()}
    whole = options.steps + len(held_out)

    def measure(seen: Observation) -> None:
        fitter.measure(seen)
        statistics[seen.layer_idx].add(seen)

    for step in range(options.steps):
        watch(model, [batches(step)], partial(fitter.learn, step=step))
        if progress is not None:
            progress(step + 1, whole, "candidates learn")
    for i, batch in enumerate(held_out, options.steps + 1):
        watch(model, [batch], measure)
        if progress is not None:
            progress(i, whole, "layers are measured")
    figures = {index: each.figures(options.tolerance) for index, each in statistics.items()}
    degrees = {index: max(each["degrees_of_freedom"]) for index, each in figures.items()}
    dims = allocate(degrees, options.cost or next(iter(shapes.values())).head_dim)
    rows = []
    for index in shapes:
        fits = fitter.fits(index)
        row = {"layer": index, **figures[index], "fits": fits, "choice": choose(fits)["name"], "dimension": dims[index]}
        rows.append(row)
    return rows


class Statistics:
    """How sharp one layer's softmax attention is, how far it looks, and how many features it takes."""

    def __init__(self, shape: LayerShape, options: InspectOptions) -> None:
        self.shape, self.window = shape, options.window
        self.points = Reservoir(DRAWS * options.points, options.seed)
        self.rows = 0
        self.even = 0.0
        self.sums = torch.zeros(3, shape.num_heads, dtype=torch.float64)  # entropy, far, sinks
        self.q_norms = torch.zeros(shape.num_heads, dtype=torch.float64)
        self.k_norms = torch.zeros(shape.num_kv_heads, dtype=torch.float64)

    @torch.no_grad()
    def add(self, seen: Observation) -> None:
        self.points.add(seen.q, seen.k, seen.key_mask)
        for b in range(len(seen.q)):  # one sequence at a time: each head's map has T^2 numbers
            real = slice(None) if seen.key_mask is None else seen.key_mask[b]
            q, k = seen.q[b][:, real].float(), seen.k[b][:, real].float()
            for sums, x in ((self.q_norms, q), (self.k_norms, k)):
                sums += torch.linalg.vector_norm(x, dim=-1).double().cpu().sum(-1)
            self._weights(q, k)

    def _weights(self, q: Tensor, k: Tensor) -> None:
        T, D = q.shape[1:]
        k = k.repeat_interleave(len(q) // len(k), 0)
        here, there = torch.arange(T, device=q.device)[:, None], torch.arange(T, device=q.device)[None]
        visible = here >= there if self.shape.causal else torch.ones(T, T, dtype=torch.bool, device=q.device)
        weights = (q @ k.mT * D**-0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        distant = (here - there).abs() >= self.window
        sinks = distant & (there < SINKS) if self.shape.causal else torch.zeros_like(distant)
        parts = [entropy(weights), (weights * (distant & ~sinks)).sum(-1), (weights * sinks).sum(-1)]
        self.sums += torch.stack([part.sum(-1) for part in parts]).double().cpu()
        self.even += float(visible.sum(-1).double().log().sum())
        self.rows += T

    def figures(self, tolerance: float) -> dict[str, Any]:
        """One number per query head, as means over queries; ``k_norm`` and ``degrees_of_freedom``: one per key head.

        ``entropy`` of the rows of weights, in nats; ``even_entropy``, of rows that weigh all their keys alike;
        ``q_norm`` and ``k_norm``, lengths of queries and keys (logits are ``q . k / sqrt(D)``); ``far``, the weight on
        keys that are further away than the window, without the sinks (causal; else further on both sides); ``sinks``,
        the weight on the first four tokens, where they are outside of the window; ``degrees_of_freedom`` of the kernel
        ``exp(q . k / sqrt(D))``.
        """
        entropies, far, sinks = (self.sums / self.rows).tolist()
        degrees = torch.stack([kernel_degrees(draw, tolerance) for draw in self.points.draws(DRAWS)]).mean(0)
        q, k = ((sums / self.rows).tolist() for sums in (self.q_norms, self.k_norms))
        return {
            "entropy": entropies, "even_entropy": self.even / self.rows, "q_norm": q, "k_norm": k, "far": far,
            "sinks": sinks, "degrees_of_freedom": degrees.tolist(),
        }  # fmt: skip


class Fitter:
    """Trains and measures the candidates of every layer, each with an optimiser of its own."""

    def __init__(self, shapes: Mapping[int, LayerShape], options: InspectOptions, device: torch.device) -> None:
        self.options = options
        self.sums: dict[tuple[int, str], Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self.cores = {
                index: make_cores(shape, options.candidates, options.window, device) for index, shape in shapes.items()
            }
        self.optimizers = {
            (index, name): torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.0)
            for index, cores in self.cores.items()
            for name, core in cores.items()
            if (parameters := list(core.parameters()))
        }

    def learn(self, seen: Observation, step: int) -> None:
        """Make one step of each candidate for a layer."""
        steps, lr = self.options.steps, self.options.lr
        rate = warmed_cosine(step, steps, max(1, steps // 20), lr, lr / 10)
        for name, core in self.cores[seen.layer_idx].items():
            optimizer = self.optimizers.get((seen.layer_idx, name))
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = rate
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
        if method in ("still", "lolcats"):
            if not shape.causal and wanted:
                raise OptionError("candidates", f"{name} has a window of past tokens, the model is bidirectional")
            if not shape.causal:
                continue
            options = options | {"window": window}
        cores[name] = build_core(plan(method, [shape], **options).layers[0], shape).to(device)
    return cores


@torch.no_grad()
def state_numbers(core: Any) -> int:
    """How many numbers the state holds after a call over 4,096 tokens; for a bidirectional layer, those of its sums.

    Everything is counted: keys, values and features of the window and of the chosen tokens, their scores, positions and
    marks, and the sums. Decoding uses another layout of the state, with room for further tokens and for the queries of
    the latest chunk, which takes twice as much memory or a little more.
    """
    if core.plan.kind == "mechanism":
        return int(core.mechanism.state_size(STATE_LENGTH))
    shape, device = core.shape, next((p.device for p in core.parameters()), None)
    q = torch.zeros(1, shape.num_heads, STATE_LENGTH, shape.head_dim, device=device)
    k, x = q[:, : shape.num_kv_heads], q.new_zeros(1, STATE_LENGTH, shape.hidden)
    return _numbers_in(core.with_state(q, k, k, x=x)[1])


def _numbers_in(state: Any) -> int:
    if isinstance(state, tuple):
        return sum(map(_numbers_in, state))
    return 0 if state is None else int(state.numel())


def choose(fits: list[Fit]) -> Fit:
    """Choose the smallest state among the candidates that miss hardly more than the best one.

    Example:
        >>> rows = [("window", 0.109, 10), ("still", 0.1, 50), ("lolcats", 0.5, 30)]
        >>> choose([{"name": name, "missed": missed, "state": state} for name, missed, state in rows])["name"]
        'window'
    """
    most = max(NEAR * min(fit["missed"] for fit in fits), SMALL)
    return min((fit for fit in fits if fit["missed"] <= most), key=lambda fit: (fit["state"], fit["missed"]))
