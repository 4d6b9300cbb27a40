import pytest
import torch
from torch import nn

from linattn.convert.evaluate.embeddings import Labelled, agreement, probe, sentence_vectors


class Words:
    """One token a letter; padded to the longest."""

    def __call__(self, texts, padding, truncation, max_length, return_tensors):
        rows = [list(text.encode())[:max_length] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return Batch(input_ids=ids, attention_mask=mask)


class Batch(dict):
    def to(self, device):
        return self


class Squares(nn.Module):
    """The hidden state of a token is its id and its square."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids, attention_mask):
        x = input_ids.float()
        return type("Output", (), {"last_hidden_state": torch.stack([x, x * x], -1)})


def test_vectors_are_means_over_real_tokens_in_the_order_of_the_sentences():
    sentences = ["abc", "a", "dddddd", "zz"]
    found = sentence_vectors(Squares(), Words(), sentences, batch_size=2, length=4)
    for sentence, vector in zip(sentences, found, strict=True):
        ids = torch.tensor(list(sentence.encode())[:4]).float()
        assert torch.allclose(vector, torch.stack([ids.mean(), (ids * ids).mean()]))


def test_agreement_is_the_cosine_and_shows_the_worst():
    teacher = torch.eye(4)
    student = teacher.clone()
    student[3] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    found = agreement(student, teacher)
    assert found["least"] == pytest.approx(0.5**0.5)
    assert found["mean"] == pytest.approx((3 + 0.5**0.5) / 4)
    assert found["count"] == 4


def test_a_probe_reads_what_is_linear_and_nothing_else():
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    linear, none = (x[:, 0] + x[:, 1] > 0).long().tolist(), torch.randint(2, (400,)).tolist()
    for labels, least, most in ((linear, 93, 100), (none, 0, 65)):
        rows = Labelled(range(300), labels[:300], range(300, 400), labels[300:])
        assert least < probe(rows, lambda places: x[list(places)]) <= most
