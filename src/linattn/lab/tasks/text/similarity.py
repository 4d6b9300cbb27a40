"""STS-B of GLUE (arXiv:1804.07461): the similarity of two sentences, as a number."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.tasks.text.batch import Sequences
from linattn.lab.tasks.text.checks import require
from linattn.lab.tasks.text.glue import Glue
from linattn.support.options import SettingError

NEAR = 0.5  # answers that are off by at most this count as right where the screen shows percent


@dataclass(frozen=True, kw_only=True)
class Similarity(Glue):
    """Regression on files as those of :class:`Glue`, but with a number as ``label``; the model has one output.

    The loss is the mean squared error. ``pearson`` is the correlation of the answers with the labels, in percent, and
    ``near`` the share of answers that are off by at most 1/2. GLUE also has Spearman's correlation, the only one that
    the code of M2, the source of the recipes, reports. It needs the ranks of all answers, which sums over batches do
    not give; do not compare ``pearson`` with it.
    """

    name = "stsb"
    metric: ClassVar[str] = "pearson"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("labels", self.labels is None, "None, as labels are numbers here", self.labels)

    @property
    def classes(self) -> int:
        return 1

    @property
    def label_names(self) -> tuple[str, ...]:
        return ()

    def _label(self, path: Path, row: Mapping[str, Any], numbers: Mapping[str, int]) -> float:
        label = row.get("label")
        if not isinstance(label, int | float) or isinstance(label, bool) or not isfinite(label):
            raise SettingError("data", f"{path}: label must be a finite number, got {label!r}")
        return float(label)

    def strata(self, labels: Tensor) -> Tensor:
        return (labels - labels.min()).round().long()

    def training_sums(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        said = logits.float().squeeze(-1)
        loss = F.mse_loss(said, targets, reduction="sum")
        return loss, ((said.detach() - targets).abs() <= NEAR).sum()

    def loss(self, logits: Tensor, batch: Sequences) -> Tensor:
        """Mean squared error, in fp32; gradients flow."""
        return self.training_sums(logits, batch.targets)[0] / len(batch)

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        """Sums that add up over batches, as in all tasks: moments of answers and labels."""
        squared, near = self.training_sums(logits, batch.targets)
        said, true = logits.squeeze(-1).double(), batch.targets.double()
        return {
            "total": torch.tensor(len(batch), dtype=torch.float64, device=logits.device),
            "squared": squared.double(), "near": near.double(),
            "said": said.sum(), "true": true.sum(), "said_said": said.square().sum(), "true_true": true.square().sum(),
            "said_true": (said * true).sum(),
        }  # fmt: skip

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        """``loss`` (mean squared error), ``pearson`` (0 where all answers are the same) and ``near``, in percent."""
        n = max(float(sums["total"]), 1.0)
        said, true = float(sums["said"]) / n, float(sums["true"]) / n
        spreads = float(sums["said_said"]) / n - said**2, float(sums["true_true"]) / n - true**2
        together = float(sums["said_true"]) / n - said * true
        spread = max(spreads[0] * spreads[1], 0.0) ** 0.5
        pearson = 100 * together / spread if spread > 0 else 0.0
        return {"loss": float(sums["squared"]) / n, "pearson": pearson, "near": 100 * float(sums["near"]) / n}
