"""Sequences that end with passages of their own: found verbatim before, in the asked share, the others untouched."""

from itertools import pairwise

import pytest
import torch

from linattn.convert.training.data import LONGEST_PASSAGE as LONGEST
from linattn.convert.training.data import SHORTEST_PASSAGE as SHORTEST
from linattn.convert.training.data import TokenText, ending_in_passages
from linattn.support.options import OptionError

LENGTH = 512
NUMBERED = TokenText(torch.arange(100_000, dtype=torch.int32), torch.arange(LENGTH))  # a token says where it was


def drawn(batches, steps):
    return torch.cat([batches(step)["input_ids"] for step in steps])


def passages(tail):
    """Runs of neighbouring numbers, with their sizes."""
    starts = [0, *(i for i in range(1, len(tail)) if tail[i] != tail[i - 1] + 1), len(tail)]
    return [(tail[i], j - i) for i, j in pairwise(starts)]


def test_the_last_quarter_is_passages_from_many_places_before_it():
    sizes, starts = [], []
    for row in drawn(NUMBERED.batches(8, LENGTH, recall_share=1.0), range(12)).tolist():
        kept = row[: LENGTH * 3 // 4]
        assert kept == list(range(row[0], row[0] + len(kept)))
        found = passages(row[len(kept) :])
        for first, size in found:
            place = first - row[0]
            assert kept[place : place + size] == list(range(first, first + size))
            starts.append(place)
            sizes.append(size)
    assert min(sizes) >= SHORTEST
    assert sum(size > LONGEST for size in sizes) <= 2  # two that lie end to end by chance read as one
    assert len(set(sizes)) > 30
    thirds = torch.tensor(starts).div(LENGTH // 4, rounding_mode="floor").bincount()
    assert len(thirds) == 3
    assert thirds.min() > len(starts) / 6


@pytest.mark.parametrize("length", [*range(64, 90), 255, 256, 257, 320, 321, 1000])
def test_passages_fill_the_end_of_every_length_with_none_too_short_or_long(length):
    for seed in range(20):
        row = ending_in_passages(torch.arange(length), torch.Generator().manual_seed(seed)).tolist()
        kept = length - length // 4
        assert len(row) == length
        assert row[:kept] == list(range(kept))
        assert max(row[kept:]) < kept
        assert all(size >= SHORTEST for _, size in passages(row[kept:]))
        if length // 4 > LONGEST:
            assert len(passages(row[kept:])) > 1
    short = torch.arange(63)
    assert torch.equal(ending_in_passages(short, torch.Generator()), short)


def test_a_share_of_the_sequences_changes_and_no_other():
    steps, plain = range(80), NUMBERED.batches(2, LENGTH, seed=3)
    before, changed = drawn(plain, steps), {}
    for share in (0.0, 0.25, 0.5, 1.0):
        after = drawn(NUMBERED.batches(2, LENGTH, seed=3, recall_share=share), steps)
        changed[share] = (after != before).any(1)
        assert torch.equal(after[~changed[share]], before[~changed[share]])
        spread = (share * (1 - share) / len(before)) ** 0.5
        assert abs(changed[share].float().mean() - share) <= 3 * spread
    assert (changed[0.25] <= changed[0.5]).all()
    assert torch.equal(plain.text.windows(LENGTH), NUMBERED.held_out[None])


def test_a_sequence_follows_from_the_seed_and_its_number_in_the_epoch():
    whole = NUMBERED.batches(4, LENGTH, seed=1, recall_share=0.5)
    first = drawn(whole, range(10))
    assert torch.equal(drawn(NUMBERED.batches(4, LENGTH, seed=1, recall_share=0.5), range(6, 10)), first[24:])
    assert torch.equal(drawn(NUMBERED.batches(5, LENGTH, seed=1, recall_share=0.5), range(8)), first)
    other = NUMBERED.batches(4, LENGTH, seed=2, recall_share=0.5)
    plain = [drawn(NUMBERED.batches(4, LENGTH, seed=seed), range(10)) for seed in (1, 2)]
    assert not torch.equal((drawn(other, range(10)) != plain[1]).any(1), (first != plain[0]).any(1))


def test_epochs_repeat_passages_of_their_own():
    text = TokenText(torch.arange(LENGTH), torch.arange(0))  # one window: each step is an epoch
    batches = text.batches(2, LENGTH, recall_share=1.0)
    rows = drawn(batches, range(2))
    assert torch.equal(rows[:, :384], torch.arange(384).expand(4, -1))
    assert len(rows.unique(dim=0)) == 4


def test_sentences_keep_their_marks_lengths_and_padding():
    text = TokenText(torch.arange(3, 100_003), torch.arange(0), around=(1, 2), pad=0)
    plain, repeating = (text.batches(64, 130, recall_share=share)(5) for share in (0.0, 1.0))
    mask = plain["attention_mask"]
    assert torch.equal(repeating["attention_mask"], mask)
    ids = repeating["input_ids"]
    assert ids.dtype == plain["input_ids"].dtype
    lengths = mask.sum(1) - 2
    assert 0 < (lengths >= 64).sum() < 64
    for row, before, length in zip(ids, plain["input_ids"], lengths.tolist(), strict=True):
        kept = length - (length // 4 if length >= 64 else 0)
        assert torch.equal(row[: 1 + kept], before[: 1 + kept])
        assert torch.equal(row[1 + length :], before[1 + length :])  # the mark and the padding
        inside = row[1 + kept : 1 + length]
        assert torch.isin(inside, row[1 : 1 + kept]).all()


def test_batches_are_told_apart():
    assert NUMBERED.batches(2, LENGTH, recall_share=0.5).fingerprint() != NUMBERED.batches(2, LENGTH).fingerprint()


def test_a_wrong_share_is_named():
    for share in (-0.1, 1.1, float("nan"), "half", True):
        with pytest.raises(OptionError, match="recall_share: must be a number at least 0 and at most 1"):
            NUMBERED.batches(2, LENGTH, recall_share=share)
    with pytest.raises(OptionError, match="recall_share: needs sequences of at least 64 tokens, got 63"):
        NUMBERED.batches(2, 63, recall_share=0.5)
