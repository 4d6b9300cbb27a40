"""Windows of text: all of it once an epoch, never what is held out, the same for the same step, with passages again."""

import json
from itertools import pairwise

import pytest
import torch
from tests.convert.tiny import Letters

from linattn.convert.training.data import LONGEST_PASSAGE, SHORTEST_PASSAGE, TokenText, ending_in_passages, read_text
from linattn.support.options import OptionError

LENGTH = 512
NUMBERED = TokenText(torch.arange(100_000, dtype=torch.int32), torch.arange(LENGTH))  # a token says where it was


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_documents_lie_end_to_end_with_the_tokenizers_own_mark(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "c", "de", "f"])
    text = read_text(path, Letters(), held_out=0.1)
    assert text.train.tolist() == [1, 3, 4, 1, 5, 1, 6, 7]
    assert text.held_out.tolist() == [1, 8]
    text = read_text(path, Letters(starts=False), held_out=0.5)
    assert text.train.tolist() == [3, 4, 2, 5, 2]
    assert text.held_out.tolist() == [6, 7, 2, 8, 2]


def test_several_files_are_one_text_and_a_single_document_is_cut(tmp_path):
    for name, content in (("a.txt", "abcdefghij"), ("b.txt", "klm")):
        (tmp_path / name).write_text(content)
    both = read_text([tmp_path / "a.txt", str(tmp_path / "b.txt")], Letters())
    assert len(both.train) == 11
    assert both.held_out.tolist() == [1, 13, 14, 15]
    one = read_text(tmp_path / "a.txt", Letters(), held_out=0.3)
    assert torch.cat([one.train, one.held_out]).tolist() == [1, *range(3, 13)]
    assert len(one.held_out) == 4


def test_an_epoch_shows_every_window_once_and_the_next_cuts_elsewhere():
    text = TokenText(torch.arange(1000), torch.arange(0))
    batches = text.batches(batch_size=3, length=10, seed=5)
    epochs = [
        [batches(epoch * batches.steps_per_epoch + step)["input_ids"] for step in range(batches.steps_per_epoch)]
        for epoch in range(2)
    ]
    seen = [torch.cat(epoch) for epoch in epochs]
    for windows in seen:
        assert torch.equal(windows - windows[:, :1], torch.arange(10).expand_as(windows))
        assert len(windows.flatten().unique()) == windows.numel() >= 960
    assert seen[0][0, 0] % 10 != seen[1][0, 0] % 10 or not torch.equal(*seen)
    again = text.batches(batch_size=3, length=10, seed=5)
    assert torch.equal(again(40)["input_ids"], batches(40)["input_ids"])
    other = text.batches(batch_size=3, length=10, seed=6)
    assert not torch.equal(other(40)["input_ids"], batches(40)["input_ids"])
    assert again.fingerprint() == batches.fingerprint() != other.fingerprint()


def test_a_text_of_a_few_windows_still_fills_batches():
    text = TokenText(torch.arange(12), torch.arange(0))
    rows = [text.batches(batch_size=4, length=5)(step)["input_ids"] for step in range(3)]
    assert all(row.shape == (4, 5) and row.max() < 12 for row in rows)
    with pytest.raises(OptionError, match="length: must not exceed the 12 tokens of the training part, got 13"):
        text.batches(batch_size=1, length=13)
    with pytest.raises(OptionError, match="held-out part, got 5; give more text"):
        text.windows(5)


def test_an_encoder_gets_sentences_with_its_marks_and_padding(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 20)
    text = read_text(path, Letters(sentences=True))
    batch = text.batches(batch_size=16, length=12)(0)
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    lengths = mask.sum(1)
    assert (ids[:, 0] == 1).all()
    assert (ids[torch.arange(16), lengths - 1] == 2).all()
    assert (ids[~mask] == 0).all()
    assert len(lengths.unique()) > 3
    assert lengths.max() == 12
    assert lengths.min() >= 6
    assert (ids[0, 1:11] > 2).all()
    windows = text.windows(12, count=3)
    assert windows.shape == (3, 12)
    assert (windows[:, 0] == 1).all()
    assert (windows[:, -1] == 2).all()


def drawn(batches, steps):
    return torch.cat([batches(step)["input_ids"] for step in steps])


def passages(tail):
    """Runs of neighbouring numbers, with their sizes."""
    starts = [0, *(i for i in range(1, len(tail)) if tail[i] != tail[i - 1] + 1), len(tail)]
    return [(tail[i], j - i) for i, j in pairwise(starts)]


@pytest.mark.parametrize("length", [*range(64, 90, 5), 255, 256, 257, 320, 321, 1000])
def test_passages_fill_the_end_of_every_length_with_none_too_short_or_long(length):
    for seed in range(20):
        row = ending_in_passages(torch.arange(length), torch.Generator().manual_seed(seed)).tolist()
        kept = length - length // 4
        assert len(row) == length
        assert row[:kept] == list(range(kept))
        assert max(row[kept:]) < kept
        assert all(size >= SHORTEST_PASSAGE for _, size in passages(row[kept:]))
        if length // 4 > LONGEST_PASSAGE:
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
