"""The folder of a run on text, which ends as a checkpoint of transformers."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Any

from torch import Tensor, nn

from linattn.support.bars import without_bars
from linattn.support.checkpoint import ResumeError, RunFolder

WEIGHTS = "model.safetensors"
ADDED = ("options", "data")


@dataclass(frozen=True)
class TextFolder(RunFolder):
    """A folder with ``config.json`` and ``model.safetensors`` for ``from_pretrained``, ``result.json`` and the log."""

    keep_weights: bool = True
    """False: a finished run leaves only its result and its log."""

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    def _check(self, saved: dict[str, Any], given: dict[str, Any]) -> None:
        # Earlier versions did not save these values: such a run is assumed to have the given ones.
        given = {name: value for name, value in given.items() if name not in ADDED or name in saved}
        super()._check(saved, given | {"data": saved.get("data")})
        if "data" in given and saved["data"] != given["data"]:
            raise ResumeError(
                f"{self.path} holds a run on other data: the files have changed since; go on with those that they "
                "were, or use another folder"
            )

    def remove_halves(self) -> None:
        super().remove_halves()
        for half in self.path.glob(".model-*"):
            rmtree(half, ignore_errors=True)

    def save_weights(self, model: nn.Module) -> None:
        if not self.keep_weights:
            return
        network: Any = model  # a TextNetwork
        tokenizer = getattr(getattr(network.task, "encoder", None), "tokenizer", None)

        def save(aside: Path) -> None:
            with without_bars():
                network.model.save_pretrained(aside)
                if tokenizer is not None:
                    tokenizer.save_pretrained(aside)

        self._put(save)

    def copy_weights(self, other: "TextFolder") -> None:
        """Copy the weights of another run and the files that belong to them."""
        apart = (other.checkpoint.name, other.result.name, other.log.name)

        def copy(aside: Path) -> None:
            for file in other.path.iterdir():
                if file.is_file() and file.name not in apart and not file.name.startswith("."):
                    copyfile(file, aside / file.name)

        self._put(copy)

    def _put(self, write: Callable[[Path], object]) -> None:
        """Write all files aside and then move them into place; the result, which marks a finished run, comes later."""
        self.path.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=self.path, prefix=".model-"))
        try:
            write(aside)
            for file in sorted(aside.iterdir()):
                os.replace(file, self.path / file.name)
        finally:
            rmtree(aside, ignore_errors=True)

    def load_weights(self) -> dict[str, Tensor]:
        """The weights for ``load_state_dict`` of the language model; tied weights appear once."""
        from safetensors.torch import load_file

        if not self.weights.exists():
            raise ResumeError(f"{self.path} holds a finished run without its weights; train into another folder")
        return load_file(self.weights)
