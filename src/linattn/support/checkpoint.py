"""The folder of a run: its files, and how a stopped run is resumed."""

import hashlib
import re
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.support.files import remove_halves, write_atomically, write_json


class ResumeError(ValueError):
    """The folder holds a different run; the message names what differs."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run: ``checkpoint.pt`` while it runs, ``weights.pt`` and ``result.json`` at the end, a log.

    Each file is written whole or not at all, so a run that is killed at any time can be resumed.
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
        remove_halves(self.path)

    def save_checkpoint(self, content: dict[str, Any]) -> None:
        write_atomically(self.checkpoint, lambda temporary: torch.save(content, temporary))

    def load_checkpoint(self, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        """The content given to ``save_checkpoint``, with tensors on the CPU; None if there is no checkpoint yet."""
        if not self.checkpoint.exists():
            return None
        content = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self._check(content["fingerprint"], fingerprint)
        return content

    def save_result(self, model: nn.Module, result: dict[str, Any], fingerprint: dict[str, Any]) -> None:
        """Write the weights, then the result, so that a result always has weights; then remove the checkpoint."""
        self.save_weights(model)
        write_json(self.result, {"fingerprint": fingerprint, **result})
        self.checkpoint.unlink(missing_ok=True)

    def save_weights(self, model: nn.Module) -> None:
        weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        write_atomically(self.weights, lambda temporary: torch.save(weights, temporary))

    def load_result(self, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a finished run, as given to ``save_result``; None if the run is not finished."""
        if not self.result.exists():
            return None
        content: dict[str, Any] = loads(self.result.read_text())
        self._check(content["fingerprint"], fingerprint)
        return {key: value for key, value in content.items() if key != "fingerprint"}

    def load_weights(self) -> dict[str, Tensor]:
        return torch.load(self.weights, map_location="cpu", weights_only=True)

    def _check(self, saved: dict[str, Any], given: dict[str, Any]) -> None:
        names = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
        if names:
            said = ", ".join(f"{name} (was {saved.get(name)!r}, is {given.get(name)!r})" for name in names)
            raise ResumeError(
                f"{self.path} holds a run with another {said}; go on with the same, or use another folder"
            )


def model_digest(model: nn.Module) -> str:
    """A digest of the model's printed form and the shapes of its parameters.

    Parameters alone are not enough: mechanisms without any would silently accept one another's weights.
    """
    printed = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    return hashlib.sha256(f"{printed}{shapes}".encode()).hexdigest()[:12]
