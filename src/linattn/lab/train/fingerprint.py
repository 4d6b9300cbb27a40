"""What a run must have in common with the one it resumes."""

from typing import Any

from torch import nn

from linattn.lab.train.config import TrainConfig
from linattn.support.checkpoint import model_digest


def run_fingerprint(model: nn.Module, config: TrainConfig, steps_per_epoch: int, processes: int) -> dict[str, Any]:
    """Everything that a run must have in common with the one it resumes, ready for JSON."""
    digest = model_digest(model)
    return {**config.fingerprint(), "model": digest, "steps_per_epoch": steps_per_epoch, "processes": processes}
