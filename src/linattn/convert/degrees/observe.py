"""Shows the queries and keys that pass through the attention layers of a model, converted or not."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.convert.adapters import find_adapter
from linattn.convert.layer.attention import Observation, linearized_layers, observing
from linattn.convert.training.loop import call

Batch = Tensor | Mapping[str, Tensor]


class SeenPairs(NamedTuple):
    """``q (B, H, T, D)`` scaled so that logits are ``q . k / sqrt(D)``, ``k (B, H_kv, T, D)``, ``key_mask (B, T)``."""

    layer_idx: int
    q: Tensor
    k: Tensor
    key_mask: Tensor | None


def watch(
    model: nn.Module, batches: Iterable[Batch], see: Callable[[SeenPairs], None], limit: int | None = None
) -> int:
    """Run the model on token ids, pictures or dicts of its arguments, and show ``see`` its queries and keys.

    ``see`` is called for every layer that can be converted. The model runs without gradients; a converted one runs as
    it was before its conversion. Returns the number of batches seen, at most ``limit``.
    """
    training, done = model.training, 0
    device = next(model.parameters()).device
    try:
        model.eval()
        with _watching(model, see), torch.no_grad():
            for batch in batches:
                if limit is not None and done >= limit:
                    break
                if isinstance(batch, Tensor):
                    model(batch.to(device))
                else:
                    call(model, {name: value.to(device) for name, value in batch.items()})
                done += 1
    finally:
        model.train(training)
    if not done:
        raise ValueError("batches must hold at least one batch")
    return done


@contextmanager
def _watching(model: nn.Module, see: Callable[[SeenPairs], None]) -> Iterator[None]:
    if linearized_layers(model):

        def observe(seen: Observation) -> None:
            see(SeenPairs(seen.layer_idx, seen.q, seen.k, seen.key_mask))

        with observing(model, observe):
            yield
        return
    adapter = find_adapter(model)
    with ExitStack() as hooks:
        for site in adapter.sites(model):
            if not site.convertible:  # its mask may be the pattern of a window, which adapters do not read
                continue
            factor = adapter.scale(model.get_submodule(site.name)) * site.shape.head_dim**0.5

            def before(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = site.layer_idx,
                factor: float = factor,
            ) -> None:  # fmt: skip
                hidden, named = adapter.hidden(args, kwargs)
                q, k, _ = adapter.project(module, hidden, **named)
                with torch.enable_grad():  # observers may learn from what they see
                    see(SeenPairs(index, q.detach() * factor, k.detach(), adapter.key_mask(**named)))

            handle = model.get_submodule(site.name).register_forward_pre_hook(before, with_kwargs=True)
            hooks.callback(handle.remove)
        yield
