"""Scores against scikit-learn's."""

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from linattn.lab.train.graph.metrics import accuracy, average_precision, binary_f1, roc_auc


@pytest.mark.parametrize("levels", [3, 10**6])  # many equal scores, and none
def test_scores_are_those_of_scikit_learn(levels):
    draw = torch.Generator().manual_seed(levels)
    labels = torch.randint(2, (500,), generator=draw)
    scores = (torch.rand(500, generator=draw) + 0.3 * labels).mul(levels).round()
    assert float(roc_auc(scores, labels)) == pytest.approx(100 * roc_auc_score(labels, scores), abs=1e-9)
    found = float(average_precision(scores, labels))
    assert found == pytest.approx(100 * average_precision_score(labels, scores), abs=1e-9)


def test_classes_are_counted_as_scikit_learn_counts_them():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (300,), generator=draw)
    logits = torch.randn(300, 2, generator=draw, dtype=torch.float64)
    logits[:, 1] += labels - 0.3
    assert float(binary_f1(logits, labels)) == pytest.approx(100 * f1_score(labels, logits.argmax(1)), abs=1e-9)
    assert binary_f1(torch.tensor([[1.0, 0.0]]), torch.tensor([0])) == 0
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 75
