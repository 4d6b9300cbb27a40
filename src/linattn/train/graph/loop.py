"""One training run on one graph."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from json import dumps, loads
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from linattn.support.files import write_atomically, write_json
from linattn.support.options import OptionError
from linattn.train.graph.config import GraphConfig
from linattn.train.graph.objective import Objective
from linattn.train.graph.optimizer import create_optimizer

RESULT, LOG, WEIGHTS = "result.json", "log.jsonl", "weights.pt"


@dataclass(frozen=True)
class GraphRecord:
    """One evaluation. Test data has no part in it: it is looked at once, when the epoch has been chosen."""

    epoch: int
    """Counted from 0."""
    train_loss: float
    val_loss: float
    val: float
    """The score, in percent."""
    seconds: float
    """Of the training steps since the last one."""


@dataclass(frozen=True)
class GraphResult:
    """A finished run: the scores of the weights that were best on validation data."""

    epoch: int
    val: float
    score: float
    """On test data, in percent."""
    scores: dict[str, float]
    """All of them, on test data."""
    seconds: float
    parameters: int
    records: list[GraphRecord] = field(default_factory=list)


OnEpoch = Callable[[GraphRecord], None]


def train_graph(
    create_model: Callable[[], nn.Module],
    objective: Objective,
    config: GraphConfig,
    folder: Path | None = None,
    *,
    settings: dict[str, Any] | None = None,
    on_epoch: OnEpoch = lambda record: None,
) -> GraphResult:
    """Train, choose the epoch by validation, test it once.

    The epoch with the best validation score wins; of equals, the one with the lower validation loss. A run that
    ``folder`` has the result of is not trained again; one that was interrupted starts anew.

    Args:
        create_model: called after the seed is set, so that it decides the first weights.
        objective: data and task, on ``config.device``.
        config: the budget.
        folder: for ``log.jsonl`` with one line an evaluation, ``weights.pt`` of the epoch that was chosen, and
            ``result.json``; None: no files.
        settings: what else decides the numbers, such as the options of the model; a folder of others is refused.
        on_epoch: called after each evaluation.
    """
    config.check()
    wanted = loads(dumps({**config.fingerprint(), **(settings or {})}))
    if folder is not None:
        finished = finished_result(folder, wanted)
        if finished is not None:
            return finished
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).write_text("")
    device = torch.device(config.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = create_model().to(device)
        records, best, weights = _epochs(model, objective, config, folder, on_epoch)
        model.load_state_dict(weights)
        model.eval()
        with torch.no_grad():
            _, scores = objective.evaluate(model, "test")
    result = GraphResult(
        records[best].epoch,
        records[best].val,
        scores[objective.metric],
        scores,
        sum(record.seconds for record in records),
        sum(parameter.numel() for parameter in model.parameters()),
        records,
    )
    if folder is not None:
        write_atomically(folder / WEIGHTS, lambda temporary: torch.save(weights, temporary))
        write_json(folder / RESULT, {"settings": wanted, **{k: v for k, v in asdict(result).items() if k != "records"}})
    return result


def _epochs(
    model: nn.Module, objective: Objective, config: GraphConfig, folder: Path | None, on_epoch: OnEpoch
) -> tuple[list[GraphRecord], int, dict[str, Tensor]]:
    """Records, the place of the best, and its weights."""
    optimizer = create_optimizer(model, config)
    draw = torch.Generator().manual_seed(config.seed)
    records: list[GraphRecord] = []
    best, highest, weights = 0, (float("-inf"), 0.0), {}
    seconds = 0.0
    for epoch in range(config.epochs):
        started = perf_counter()
        model.train()
        loss = objective.loss(model, draw)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        train_loss = float(loss.detach())  # waits for the device: starting the work alone is not what is timed
        seconds += perf_counter() - started
        if train_loss - train_loss != 0:
            raise RuntimeError(f"the training loss is not finite: epoch {epoch}, lr {config.lr:g}; a lower lr helps")
        if (epoch + 1) % config.eval_every and epoch + 1 < config.epochs:
            continue
        model.eval()
        with torch.no_grad():
            val_loss, scores = objective.evaluate(model, "val")
        records.append(GraphRecord(epoch, train_loss, val_loss, scores[objective.metric], seconds))
        seconds = 0.0
        if (records[-1].val, -val_loss) > highest:
            best, highest = len(records) - 1, (records[-1].val, -val_loss)
            weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        if folder is not None:
            with (folder / LOG).open("a") as log:
                log.write(dumps(asdict(records[-1])) + "\n")
        on_epoch(records[-1])
        if config.patience and len(records) - 1 - best >= config.patience:
            break
    return records, best, weights


def finished_result(folder: Path, wanted: dict[str, Any]) -> GraphResult | None:
    """What ``folder`` has, if it was made with the settings ``wanted``; None if there is none."""
    path = folder / RESULT
    if not path.exists():
        return None
    found = loads(path.read_text())
    stored = found.pop("settings")
    if stored != wanted:
        changed = [name for name in {**stored, **wanted} if stored.get(name) != wanted.get(name)]
        words = ", ".join(f"{name} was {stored.get(name)}, now {wanted.get(name)}" for name in changed)
        raise OptionError("output", f"{folder} holds a run with other settings ({words}): name another")
    lines = (folder / LOG).read_text().splitlines()
    return GraphResult(**found, records=[GraphRecord(**loads(line)) for line in lines])
