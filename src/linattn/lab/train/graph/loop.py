"""The training loop for graphs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linattn.lab.train.graph.config import GraphConfig
from linattn.lab.train.graph.epochs import GraphRecord, OnEpoch, run_epochs
from linattn.lab.train.graph.objective import Objective
from linattn.support.files import write_atomically, write_json
from linattn.support.options import OptionError

RESULT, LOG, WEIGHTS = "result.json", "log.jsonl", "weights.pt"


@dataclass(frozen=True)
class GraphResult:
    """The result of a finished run: scores of the weights that were best on validation data."""

    epoch: int
    val: float
    score: float
    """The first score on test data, in percent."""
    scores: dict[str, float]
    """All scores on test data."""
    seconds: float
    parameters: int
    records: list[GraphRecord] = field(default_factory=list)


def train_graph(
    create_model: Callable[[], nn.Module],
    objective: Objective,
    config: GraphConfig,
    folder: Path | None = None,
    *,
    settings: dict[str, Any] | None = None,
    on_epoch: OnEpoch = lambda record: None,
) -> GraphResult:
    """Train, choose the best epoch on validation data, and test it once.

    The epoch with the best validation score wins; among equals, the one with the lower validation loss. If ``folder``
    has the result of this run, it is not trained again; an interrupted run starts anew.

    Args:
        create_model: called after the seed is set, which thus decides the first weights.
        objective: data and task, on ``config.device``.
        config: how to train.
        folder: for ``log.jsonl`` with one line for each evaluation, ``weights.pt`` of the best epoch, and
            ``result.json``; None: no files.
        settings: what else decides the result, such as options of the model; a folder with others is refused.
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
        records, best, weights = run_epochs(model, objective, config, folder and folder / LOG, on_epoch)
        model.load_state_dict(weights)
        model.eval()
        with torch.no_grad():
            scores = {name: float(score) for name, score in objective.evaluate(model, "test")[1].items()}
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


def finished_result(folder: Path, wanted: dict[str, Any]) -> GraphResult | None:
    """The result in ``folder``, or None; raises if it was made with other settings than ``wanted``."""
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
