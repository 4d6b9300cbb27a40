"""Scores against scikit-learn's."""

import pytest
import torch

from linattn.lab.train.graph import accuracy, average_precision, binary_f1, roc_auc


@pytest.mark.parametrize("levels", [3, 10**6])  # many equal scores, and none
def test_scores_are_those_of_scikit_learn(levels):
    from sklearn.metrics import average_precision_score, roc_auc_score

    draw = torch.Generator().manual_seed(levels)
    labels = torch.randint(2, (500,), generator=draw)
    scores = (torch.rand(500, generator=draw) + 0.3 * labels).mul(levels).round()
    assert roc_auc(scores, labels) == pytest.approx(100 * roc_auc_score(labels, scores), abs=1e-9)
    assert average_precision(scores, labels) == pytest.approx(100 * average_precision_score(labels, scores), abs=1e-9)


def test_f1_of_two_classes_is_that_of_scikit_learn():
    from sklearn.metrics import f1_score

    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (300,), generator=draw)
    logits = torch.randn(300, 2, generator=draw, dtype=torch.float64)
    logits[:, 1] += labels - 0.3
    assert binary_f1(logits, labels) == pytest.approx(100 * f1_score(labels, logits.argmax(1)), abs=1e-9)
    assert binary_f1(torch.tensor([[1.0, 0.0]]), torch.tensor([0])) == 0
    with pytest.raises(ValueError, match="two classes"):
        binary_f1(torch.eye(3), torch.arange(3))


def test_accuracy_counts_rows():
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 75
    with pytest.raises(ValueError, match="both kinds"):
        roc_auc(torch.rand(3), torch.ones(3))
