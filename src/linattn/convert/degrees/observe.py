"""Shows what passes through the attention layers of a model, and keeps a uniform sample of its queries and keys."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from linattn.convert.adapters import find_adapter
from linattn.convert.adapters.base import Site
from linattn.convert.evaluate.quiet import quiet
from linattn.convert.layer.attention import Observation, exact_attention, linearized_layers, observing
from linattn.convert.training.loop import call

Batch = Tensor | Mapping[str, Tensor]


def watch(model: nn.Module, batches: Iterable[Batch], see: Callable[[Observation], None]) -> None:
    """Run the model on token ids, pictures or dicts of its arguments, and show ``see`` each layer's observation.

    ``see`` is called for every layer that can be converted. The model runs without gradients and does not change; a
    converted one runs as it was before its conversion.
    """
    done = False
    with quiet(model) as device, _watching(model, see):
        for batch in batches:
            if isinstance(batch, Tensor):
                model(batch.to(device))
            else:
                call(model, {name: value.to(device) for name, value in batch.items()})
            done = True
    if not done:
        raise ValueError("batches must hold at least one batch")


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

            if site.convertible:  # else its mask may be the pattern of a window, which adapters do not read
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
        if capacity < 1:
            raise ValueError(f"capacity must be an integer >= 1, got {capacity!r}")
        self.capacity = capacity
        self._generator = Generator().manual_seed(seed)
        self._rank = torch.empty(0, dtype=torch.float64)
        self._points: Tensor | None = None  # (H_kv, N, D), fp32, in the order of their rank
        self._keys = torch.empty(0, dtype=torch.bool)  # (N,): this point is a key
        self._sum, self._count = torch.zeros(()), 0

    def add(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> None:
        """Add ``q (B, H, T, D)`` and ``k (B, H_kv, T, D)``; ``key_mask (B, T)`` is True at real tokens."""
        queries, keys = _rows(q.detach(), k.detach(), key_mask)
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


def _rows(q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries of each group, and keys, both ``(H_kv, rows, D)``, without padding."""
    B, H_kv, T, D = k.shape
    if q.shape[1] % H_kv or (q.shape[0], *q.shape[2:]) != (B, T, D):
        raise ValueError(f"q must be (B, H, T, D) with heads in groups of {tuple(k.shape)}, got {tuple(q.shape)}")
    grouped = q.unflatten(1, (H_kv, -1)).permute(1, 2, 0, 3, 4)  # (H_kv, group, B, T, D)
    keys = k.transpose(0, 1)
    if key_mask is not None:
        return grouped[:, :, key_mask].flatten(1, 2), keys[:, key_mask]
    return grouped.flatten(1, 3), keys.flatten(1, 2)
