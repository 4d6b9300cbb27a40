"""What a run leaves in its folder, and how one that was stopped goes on."""

import hashlib
import re
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.support.files import write_atomically, write_json
from linattn.train.config import TrainConfig


class ResumeError(ValueError):
    """The folder holds another run; the message names what differs."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run: ``checkpoint.pt`` on the way, ``weights.pt`` and ``result.json`` at the end, the log.

    Each is written whole or not at all, so a kill at any time leaves a folder that can be gone on with.
    """

    path: Path

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def weights(self) -> Path:
        return self.path / "weights.pt"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    def remove_halves(self) -> None:
        """Files that a kill left half written: they never got their name."""
        for path in (self.checkpoint, self.weights, self.result, self.log):
            for half in self.path.glob(f".{path.stem}-*{path.suffix}"):
                half.unlink(missing_ok=True)

    def save_checkpoint(self, content: dict[str, Any]) -> None:
        write_atomically(self.checkpoint, lambda temporary: torch.save(content, temporary))

    def load_checkpoint(self, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        """What ``save_checkpoint`` got, tensors on the CPU; None if the run has not come that far."""
        if not self.checkpoint.exists():
            return None
        content = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self._check(content["fingerprint"], fingerprint)
        return content

    def save_result(self, model: nn.Module, result: dict[str, Any], fingerprint: dict[str, Any]) -> None:
        """The weights first: where there is a result, there are weights. Then the checkpoint has served its time."""
        self.save_weights(model)
        write_json(self.result, {"fingerprint": fingerprint, **result})
        self.checkpoint.unlink(missing_ok=True)

    def save_weights(self, model: nn.Module) -> None:
        weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        write_atomically(self.weights, lambda temporary: torch.save(weights, temporary))

    def load_result(self, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a run that is finished, as ``save_result`` got it, else None."""
        if not self.result.exists():
            return None
        content: dict[str, Any] = loads(self.result.read_text())
        self._check(content["fingerprint"], fingerprint)
        del content["fingerprint"]
        return content

    def load_weights(self) -> dict[str, Tensor]:
        return torch.load(self.weights, map_location="cpu", weights_only=True)

    def _check(self, saved: dict[str, Any], given: dict[str, Any]) -> None:
        names = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
        if names:
            said = ", ".join(f"{name} (was {saved.get(name)!r}, is {given.get(name)!r})" for name in names)
            raise ResumeError(
                f"{self.path} holds a run with another {said}; go on with the same, or use another folder"
            )


def run_fingerprint(model: nn.Module, config: TrainConfig, steps_per_epoch: int, processes: int) -> dict[str, Any]:
    """Everything that a run must have in common with the one it goes on with, ready for JSON."""
    digest = model_digest(model)
    return {**config.fingerprint(), "model": digest, "steps_per_epoch": steps_per_epoch, "processes": processes}


def model_digest(model: nn.Module) -> str:
    """The model by its printed form and the shapes of its parameters.

    Mechanisms without parameters of their own would take one another's weights without a word.
    """
    printed = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    return hashlib.sha256(f"{printed}{shapes}".encode()).hexdigest()[:12]
