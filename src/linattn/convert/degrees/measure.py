"""Degrees of freedom of every layer and head of a model, what features start from, and how layers share a budget."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from linattn.convert.adapters.families import Site, find_adapter
from linattn.convert.convert import Observation, exact_attention, linearized_layers, observing
from linattn.convert.core import RandomFeatures
from linattn.convert.degrees.kernel import kernel_degrees, log_features, normal_features, scaled
from linattn.convert.training.loop import Batches, call, quiet

Batch = Tensor | Mapping[str, Tensor]

MEASURED_BATCHES = 16
# The degrees of one draw depend on its few points of large norm: with three draws every seed gave other dimensions,
# and those were no better than equal ones. At a tolerance of 2^-8, layers of small models hardly differ.
POINTS, DRAWS, TOLERANCE = 512, 16, 2**-4


def watch(model: nn.Module, batches: Iterable[Batch], see: Callable[[Observation], None]) -> None:
    """Run the model on token ids, pictures or dicts of its arguments, and show ``see`` each layer's observation.

    ``see`` is called for every layer that can be converted. The model runs without gradients and does not change; a
    converted one runs as it was before its conversion.
    """
    with quiet(model) as device, _watching(model, see):
        for batch in batches:
            if isinstance(batch, Tensor):
                model(batch.to(device))
            else:
                call(model, {name: value.to(device) for name, value in batch.items()})


@contextmanager
def _watching(model: nn.Module, see: Callable[[Observation], None]) -> Iterator[None]:
    if linearized_layers(model):
        with observing(model, see):
            yield
        return
    adapter = find_adapter(model)
    with ExitStack() as hooks:
        for site in adapter.sites(model):

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site = site) -> None:
                x, named = adapter.hidden(args, kwargs)
                q, k, v = adapter.project(module, x, **named)
                q = q * (adapter.scale(module) * site.shape.head_dim**0.5)
                mask = adapter.key_mask(**named)
                output = exact_attention(q, k, v, mask, causal=site.shape.causal)
                with torch.enable_grad():  # observers may learn from what they see
                    see(Observation(site.layer_idx, q, k, v, x, mask, output))

            if site.why_not is None:  # else its mask may be the pattern of a window, which adapters do not read
                handle = model.get_submodule(site.name).register_forward_pre_hook(before, with_kwargs=True)
                hooks.callback(handle.remove)
        yield


class Reservoir:
    """``capacity`` points of each key head, drawn without replacement from all that were added.

    Queries and keys are inputs of the same kernel: with grouped heads, the queries of a group and their keys are one
    population. Positions are drawn once for all heads. Every row gets a random number, and those with the largest
    numbers stay: every subset is equally likely, whatever the order and the sizes of what is added.

    Example:
        >>> import torch
        >>> points = Reservoir(8, seed=0)
        >>> points.add(torch.randn(2, 4, 10, 16), torch.randn(2, 2, 10, 16))  # 4 query heads on 2 key heads
        >>> points.draws(2).shape  # two draws of 4 points
        torch.Size([2, 2, 4, 16])
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self._generator = Generator().manual_seed(seed)
        self._rank = torch.empty(0, dtype=torch.float64)
        self._points: Tensor | None = None  # (H_kv, N, D), fp32, in the order of their rank
        self._keys = torch.empty(0, dtype=torch.bool)  # (N,): this point is a key
        self._sum, self._count = torch.zeros(()), 0

    def add(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> None:
        """Add ``q (B, H, T, D)`` and ``k (B, H_kv, T, D)``; ``key_mask (B, T)`` is True at real tokens."""
        real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        grouped = q.detach().unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3, 4)  # (H_kv, group, B, T, D)
        queries, keys = grouped[:, :, real].flatten(1, 2), k.detach().transpose(0, 1)[:, real]  # (H_kv, rows, D)
        self._sum, self._count = self._sum + keys.double().sum(1).cpu(), self._count + keys.shape[1]
        rows = torch.cat((queries, keys), 1)
        rank = torch.rand(rows.shape[1], generator=self._generator, dtype=torch.float64)
        new = rank.topk(min(self.capacity, len(rank))).indices
        rows = rows[:, new.to(rows.device)].to("cpu", torch.float32)
        rank, is_key = rank[new], new >= queries.shape[1]
        if self._points is not None:
            rows, rank = torch.cat((self._points, rows), 1), torch.cat((self._rank, rank))
            is_key = torch.cat((self._keys, is_key))
        kept = rank.topk(min(self.capacity, len(rank))).indices
        self._points, self._rank, self._keys = rows[:, kept], rank[kept], is_key[kept]

    def draws(self, count: int, *, center: bool = False) -> Tensor:
        """``count`` disjoint draws of equal size ``(count, H_kv, J, D)``; J is ``capacity / count``, or less."""
        points = self.points(center=center)
        J = points.shape[1] // count
        if J < 1:
            raise ValueError(f"{count} draws need at least {count} points, {points.shape[1]} were seen")
        # Rows are sorted by their random numbers, so every slice of them is a random one.
        return points[:, : count * J].unflatten(1, (count, J)).transpose(0, 1)

    def points(self, *, center: bool = False) -> Tensor:
        """All points ``(H_kv, N, D)``, fp32; ``center`` subtracts the mean key from keys (same softmax attention)."""
        if self._points is None:
            raise ValueError("no points were added")
        return self._points - self._keys.unsqueeze(-1) * self.key_mean().unsqueeze(1) if center else self._points

    def keys(self) -> Tensor:
        """The points that are keys, ``(H_kv, N', D)``, as they were added."""
        return self.points()[:, self._keys]

    def key_mean(self) -> Tensor:
        """Mean of all keys that were added, ``(H_kv, D)``."""
        return (self._sum / self._count).float()


@dataclass(frozen=True, eq=False)
class MeasuredLayer:
    """Degrees of freedom of one layer, for each key head, and the keys they were measured on."""

    mean: Tensor  # (H_kv,), mean over draws
    std: Tensor  # (H_kv,), standard deviation between draws
    center: Tensor  # (H_kv, D), the mean key
    keys: Tensor  # (H_kv, N, D), the keys themselves


def measured(
    model: nn.Module, batches: Batches, layers: Sequence[int], tolerance: float = TOLERANCE
) -> dict[int, MeasuredLayer]:
    """Degrees of freedom of real queries and keys on the first batches of a training, for each key head of ``layers``.

    Each measurement is repeated on disjoint draws of queries and keys. The mean key is subtracted from the keys, which
    does not change softmax attention: in pretrained models it makes up most of their length, and features of long
    vectors hardly overlap. The paper has a tolerance of 2^-4 for GPT-2 and 2^-8 for Pythia-1B.
    """
    samples = {index: Reservoir(POINTS * DRAWS) for index in layers}

    def see(seen: Observation) -> None:
        if seen.layer_idx in samples:
            samples[seen.layer_idx].add(seen.q, seen.k, seen.key_mask)

    watch(model, [batches(step) for step in range(MEASURED_BATCHES)], see)
    found = {}
    for index, sample in sorted(samples.items()):
        values = torch.stack([kernel_degrees(draw, tolerance) for draw in sample.draws(DRAWS, center=True)])
        found[index] = MeasuredLayer(values.mean(0), values.std(0), sample.key_mean(), sample.keys())
    return found


@torch.no_grad()
def start_features(model: nn.Module, degrees: Mapping[int, MeasuredLayer], seed: int) -> None:
    """Redraw the random features of a converted model, ``z ~ N(0, I)``; other features stay.

    Leverage scores would serve the kernel itself, in which the few points of large norm outweigh all others. But rows
    of attention are divided by their sums, so that every query counts alike: for these, and as a start for learning
    them, few features (64 per head of a small Llama) drawn from N(0, I) were better.

    The unit of a head's key features is the median, over keys, of the largest feature: much larger or smaller features
    would overflow or vanish in fp32.
    """
    generator = Generator().manual_seed(seed)
    for index, layer in linearized_layers(model).items():
        maps = getattr(layer.core, "features", None)
        if isinstance(maps, RandomFeatures):
            heads, count, dim = maps.z.shape
            drawn, seen = normal_features(heads, count, dim, generator), degrees[index]
            maps.z.copy_(drawn.z)
            maps.log_alpha.copy_(drawn.log_alpha)
            maps.center.copy_(seen.center)
            logs = log_features(scaled(seen.keys - seen.center.unsqueeze(1)), drawn)
            maps.log_unit.copy_(logs.amax(-1).median(-1).values)


def allocate(
    values: Mapping[int, float], cost: int, *, multiple: int | None = None, clip: int | None = None
) -> dict[int, int]:
    """Choose a dimension for each layer, in proportion to ``values``, with ``cost`` as the mean of all dimensions.

    Dimensions are multiples of ``multiple`` (None: of 16, or of a smaller cost), and at least that; what layers at this
    limit take, the others give (water filling): the factor t solves ``sum_s max(t N_s, multiple) = cost * layers``,
    then all dimensions are rounded down and the rest is given out in multiples, the largest remainder first. Where
    ``cost * layers`` is not a multiple itself, what remains stays unused: the budget is never exceeded.

    ``clip`` is the paper's "DoF+Clip" and is applied last, ``M_s = min(M_s, clip)``: what it takes from a layer is
    saved, not given to the others.

    Example:
        >>> allocate({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64)
        {0: 160, 1: 48, 2: 32, 3: 16}
        >>> allocate({0: 40.0, 1: 10.0, 2: 10.0, 3: 4.0}, 64, clip=64)
        {0: 64, 1: 48, 2: 32, 3: 16}
    """
    for layer, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"values must be finite and > 0, got {value!r} for layer {layer}")
    multiple = multiple or min(16, cost)
    units = cost * len(values) // multiple  # all layers' budget
    shares = _fill(values, units)
    dims = {layer: math.floor(share) for layer, share in shares.items()}
    # The largest remainder first; among equal ones the larger value, then the earlier layer.
    order = sorted(shares, key=lambda layer: (dims[layer] - shares[layer], -values[layer]))
    for layer in [layer for layer in order if dims[layer] < units][: units - sum(dims.values())]:
        dims[layer] += 1
    return {layer: int(min(multiple * share, clip or math.inf)) for layer, share in dims.items()}


def _fill(values: Mapping[int, float], units: int) -> dict[int, float]:
    """Shares ``clip(t v, 1, units)`` whose sum is ``units``, by bisection on ``log t``: the sum grows with t."""
    logs = {layer: math.log(value) for layer, value in values.items()}

    def shares(log_t: float) -> dict[int, float]:
        # In logarithms: t v itself may overflow where values differ by many orders of magnitude.
        kept = {layer: min(max(log_t + log, 0), math.log(units)) for layer, log in logs.items()}
        return {layer: min(max(math.exp(x), 1), units) for layer, x in kept.items()}

    below, above = -max(logs.values()), math.log(units) - min(logs.values())
    for _ in range(200):
        middle = (below + above) / 2
        if sum(shares(middle).values()) < units:
            below = middle
        else:
            above = middle
    return shares(below)  # the lower end: after rounding down, the sum cannot exceed the budget
