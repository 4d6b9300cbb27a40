"""The training loop for graphs. On a GPU the host runs ahead: it reads results in blocks and never waits for a step."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from linattn.lab.train.graph.objective import GraphConfig, Objective
from linattn.support.files import write_atomically

BLOCK = 25  # evaluations between two reads of results from a GPU
# Names of modules around attention, and of those that pass messages over edges, where a model has both.
BRANCHES = {"attention": ("stem", "blocks", "last"), "graph": ("convolutions",)}
Record = dict[str, Any]


class NotFiniteError(RuntimeError):
    """The training loss is not finite."""


def train_graph(
    create_model: Callable[[], nn.Module],
    objective: Objective,
    config: GraphConfig,
    folder: Path | None = None,
    *,
    test: bool = True,
    on_record: Callable[[Record], None] = lambda record: None,
) -> dict[str, Any]:
    """Train, choose the best epoch on validation data, and test it once, if ``test``.

    The epoch with the best validation score wins; among equals, the one with the lower validation loss, then the first.
    The result has the ``epoch`` (counted from 1), the score ``val`` on validation data and on test data ``scores``, of
    which ``score`` is the first, all in percent; ``seconds``, ``parameters``, and ``records``: all evaluations.

    Args:
        create_model: called after the seed is set, which thus decides the first weights.
        objective: data and task, on ``config.device``.
        config: how to train.
        folder: for ``weights.pt`` of the best epoch; None: no files.
        on_record: called with each evaluation.
    """
    device = torch.device(config.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = create_model().to(device)
        begin = perf_counter()
        records, weights = run_epochs(model, objective, config, on_record)
        seconds = perf_counter() - begin
        model.load_state_dict(weights)
        model.eval()
        best = records[best_of(records)]
        result = {"epoch": best["round"], "val": best["score"], "score": best["score"], "seconds": seconds,
                  "parameters": sum(parameter.numel() for parameter in model.parameters())}  # fmt: skip
        if test:
            with torch.no_grad():
                scores = {name: float(score) for name, score in objective.evaluate(model, "test")[1].items()}
            result |= {"score": scores[objective.metric], "scores": scores}
    if folder is not None:
        kept = {name: value.cpu() for name, value in weights.items()}
        write_atomically(folder / "weights.pt", lambda temporary: torch.save(kept, temporary))
    return result | {"records": records}


def run_epochs(
    model: nn.Module, objective: Objective, config: GraphConfig, on_record: Callable[[Record], None]
) -> tuple[list[Record], dict[str, Tensor]]:
    """Train. Returns all evaluations, and the weights of the best."""
    optimizer = create_optimizer(model, config)
    draw, best = torch.Generator().manual_seed(config.seed), Best(model)
    # Patience has to know each result before the next epoch.
    block = BLOCK if config.device != "cpu" and not config.patience else 1
    records: list[Record] = []
    waiting: list[tuple[int, Tensor]] = []
    for epoch in range(1, config.epochs + 1):
        model.train()
        loss = objective.loss(model, draw)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if epoch % config.eval_every and epoch < config.epochs:
            continue
        model.eval()
        with torch.no_grad():
            val_loss, scores = objective.evaluate(model, "val")
        score = scores[objective.metric]
        best.offer(score, val_loss)
        waiting.append((epoch, torch.stack([loss.detach().double(), val_loss, score])))
        if len(waiting) < block and epoch < config.epochs:
            continue
        numbers = torch.stack([numbers for _, numbers in waiting]).tolist()  # waits for the device, once for each block
        for (at, _), (train_loss, held_out, percent) in zip(waiting, numbers, strict=True):
            if train_loss - train_loss != 0:
                raise NotFiniteError(f"the training loss is not finite: epoch {at}, lr {config.lr:g}; a lower lr helps")
            records.append({"round": at, "train_loss": train_loss, "val_loss": held_out, "score": percent})
            on_record(records[-1])
        waiting = []
        if config.patience and len(records) - 1 - best_of(records) >= config.patience:
            break
    return records, best.weights


class Best:
    """The weights of the best evaluation so far, chosen on the device by the score, then by the lower loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        device = next(iter(self.weights.values())).device
        self.score, self.loss = (torch.full((), x, dtype=torch.float64, device=device) for x in (-torch.inf, torch.inf))

    @torch.no_grad()
    def offer(self, score: Tensor, loss: Tensor) -> None:
        better = (score > self.score) | ((score == self.score) & (loss < self.loss))
        self.score, self.loss = torch.where(better, score, self.score), torch.where(better, loss, self.loss)
        for name, value in self.model.state_dict().items():
            self.weights[name] = torch.where(better, value, self.weights[name])


def best_of(records: list[Record]) -> int:
    """The index of the best score; among equals the lower validation loss, then the first."""
    return max(range(len(records)), key=lambda i: (records[i]["score"], -records[i]["val_loss"]))


def create_optimizer(model: nn.Module, config: GraphConfig) -> torch.optim.Adam:
    """Adam with a weight decay for each branch of a model with attention, and one for all other parameters."""
    decays = {"attention": config.attention_weight_decay, "graph": config.graph_weight_decay, "other": None}
    groups: dict[str, list[nn.Parameter]] = {branch: [] for branch in decays}
    branches = BRANCHES if len(getattr(model, "blocks", ())) else {}
    for name, parameter in model.named_parameters():
        branch = next((b for b, modules in branches.items() if name.split(".")[0] in modules), "other")
        groups[branch].append(parameter)
    return torch.optim.Adam(
        [
            {"params": params, "weight_decay": config.weight_decay if (own := decays[b]) is None else own}
            for b, params in groups.items()
            if params
        ],
        lr=config.lr,
    )
