"""Cross-entropy for labels and for mixed images."""

import torch.nn.functional as F
from torch import Tensor


def training_loss(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """``mean_i -sum_c t_ic log softmax(logits_i)_c``, in fp32 at least.

    For labels ``targets (b,)`` and s = label_smoothing over C classes, ``t_ic = (1 - s) [c = target_i] + s / C``.
    Targets ``(b, C)`` are used as they are: those of mixed images are smoothed already.
    """
    logits = logits.float() if logits.itemsize < 4 else logits
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing if targets.ndim == 1 else 0.0)
