"""Text from files: parts, windows, documents, tokenizers, hidden tokens, and the needle."""

import gzip
import itertools
import json
import re
from math import log

import pytest
import torch

from linattn.lab.tasks.text import IGNORED, text_task
from linattn.lab.tasks.text.language import Bytes, load_corpus, part_borders
from linattn.lab.tasks.text.task import content_digest
from linattn.support.options import OptionError
from linattn.support.seeds import as_generator

CONTENT = bytes((7 * n + n * n // 50) % 251 for n in range(4000))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_bytes(CONTENT)
    return str(path)


def test_parts_are_cut_in_order_and_nothing_is_lost(file, tmp_path):
    parts = load_corpus(file, Bytes(), valid=0.1, test=0.2)[0]
    assert [len(parts[name]) for name in ("train", "valid", "test")] == [2800, 400, 800]
    assert bytes(torch.cat([part.tokens for part in parts.values()]).tolist()) == CONTENT
    (tmp_path / "some.gz").write_bytes(gzip.compress(CONTENT))
    packed = load_corpus(str(tmp_path / "some.gz"), Bytes(), valid=0.1, test=0.2)[0]
    assert all(torch.equal(packed[name].tokens, parts[name].tokens) for name in parts)


def test_a_file_of_the_size_of_enwik8_has_the_usual_parts():
    assert part_borders([100_000_000], 0.3, 0.3) == (0, 90_000_000, 95_000_000, 100_000_000)
    assert part_borders([100_000_001], 0.05, 0.05) == (0, 90_000_001, 95_000_001, 100_000_001)
    assert part_borders([40, 5, 50, 5], 0.1, 0.1) == (0, 80, 90, 100)  # moved, a part would be empty
    assert part_borders([40, 42, 10, 8], 0.1, 0.1) == (0, 82, 92, 100)


def test_training_windows_are_pieces_of_the_training_part(file):
    task = text_task("text", data=file, length=50)
    assert task.vocabulary == 256
    batch = task.train_batch(30, 0, 0)
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert tokens[1:] == targets[:-1]
        assert bytes([*tokens, targets[-1]]) in CONTENT[:3600]
    assert torch.equal(batch.inputs, text_task("text", data=file, length=50).train_batch(30, 0, 0).inputs)
    assert not torch.equal(batch.inputs, task.train_batch(30, 0, 1).inputs)
    narrow = text_task("text", data=file, length=1998, valid=0.0, test=0.5).train_batch(100, 0, 0)
    assert set(map(bytes, narrow.inputs.tolist())) == {CONTENT[:1998], CONTENT[1:1999]}  # wherever a window fits


@pytest.mark.parametrize("part", ["test", "valid"])
def test_test_windows_cover_the_part_once(file, part):
    task = text_task("text", data=file, length=64, evaluate=part)
    batches = list(task.test_batches(2))
    expected = CONTENT[3800:] if part == "test" else CONTENT[3600:3800]
    targets = torch.cat([batch.targets for batch in batches]).flatten()
    assert bytes(targets[targets != IGNORED].tolist()) == expected[1:]
    inputs = torch.cat([batch.inputs for batch in batches]).flatten()
    assert bytes(inputs[:199].tolist()) == expected[:199]
    assert sum(len(batch) for batch in text_task("text", data=file, length=64, test_windows=2).test_batches(1)) == 2
    found = task.metrics(task.score(torch.zeros(2, 64, 256), batches[0]))  # an even guess
    assert (found["bits_per_byte"], found["loss"]) == pytest.approx((8, log(256)))


@pytest.fixture
def folder(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([65 + number]) * (20 + number))
    return str(tmp_path)


def test_documents_end_with_a_token_and_are_not_cut(folder):
    parts, vocabulary = load_corpus(folder, Bytes(), valid=0.1, test=0.1)
    assert vocabulary == 257
    found = [
        piece
        for part in parts.values()
        for piece in " ".join(map(str, part.tokens.tolist())).removesuffix(" 256").split(" 256 ")
    ]
    assert [(set(piece.split()), len(piece.split())) for piece in found] == [({str(65 + n)}, 20 + n) for n in range(30)]
    part = parts["test"]
    assert part.num_bytes == len(part) - len(part.starts)


def test_packed_windows_are_cut_where_documents_begin(folder):
    task = text_task("text", data=folder, length=60, packed=True, test=0.2)
    batch = task.train_batch(6, 0, 0)
    assert batch.inputs.shape == (1, 360)
    cuts = batch.cu_seqlens.tolist()
    assert {60 * n for n in range(7)} <= set(cuts)
    assert len(cuts) > 7
    tokens, targets = batch.inputs[0].tolist(), batch.targets[0].tolist()
    for begin, end in itertools.pairwise(cuts):
        inside = tokens[begin:end]
        assert len(set(inside) - {256}) <= 1
        assert 256 not in inside[:-1]
        assert targets[begin : end - 1] == inside[1:]
        assert (targets[end - 1] == IGNORED) == (inside[-1] == 256)
    plain = text_task("text", data=folder, length=60, test=0.2)
    assert torch.equal(plain.train_batch(6, 0, 0).inputs.view(1, -1), batch.inputs)
    packed = next(task.test_batches(2))
    assert torch.equal(next(plain.test_batches(2)).inputs.view(1, -1), packed.inputs)
    assert task.score(torch.zeros(1, 120, 257), packed)["total"] == (packed.targets != IGNORED).sum() > 100
    with pytest.raises(ValueError, match="cannot be taken apart"):
        packed.take(slice(0, 1))
    with pytest.raises(OptionError, match="packed: must be False"):
        text_task("masked-text", data=folder, length=60, packed=True, test=0.2)


def test_jsonl_lines_are_documents(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps({"text": "é" * n}) for n in range(1, 40)) + "\n\n")
    parts, _ = load_corpus(str(path), Bytes())
    assert sum(part.num_bytes for part in parts.values()) == 2 * sum(range(1, 40))
    for line, message in (('{"txt": 3}', 'needs a "text", got txt'), ('{"text"', r"lines.jsonl:2 is no JSON")):
        path.write_text('{"text": "a"}\n' + line + "\n")
        with pytest.raises(ValueError, match=message):
            load_corpus(str(path), Bytes())


def test_wrong_sources_and_lengths_are_named(file, tmp_path):
    (tmp_path / "enwik8.zip").write_bytes(CONTENT)  # as it is offered: its packed bytes would be learnt
    for settings, message in (
        ({"data": str(tmp_path / "enwik8.zip")}, "data: .* is an archive.*: unpack it"),
        ({"data": str(tmp_path / "none")}, "data: .* does not exist"),
        ({"data": file, "length": 200}, "length: must be below the 200 tokens of the test part"),
        ({"data": file, "evaluate": "train"}, "evaluate: must be one of test, valid"),
        ({"data": file, "test": 0.95}, "test: must be at least 0 and at most 0.9"),
        ({"data": file, "test": 0.9, "valid": 0.1}, "valid . test: must be at most 0.95"),
        ({"data": file, "tokenizer": str(tmp_path / "none")}, "tokenizer: must be a folder"),
    ):
        with pytest.raises(OptionError, match=message):
            text_task("text", **settings)


def test_hidden_tokens_are_15_percent_split_80_10_10(file):
    task = text_task("masked-text", data=file, length=100)
    assert task.vocabulary == 258
    tokens = torch.randint(200, (400, 100), generator=as_generator(0))
    batch = task.hide(as_generator(1), tokens, 0.15)
    chosen = batch.targets != IGNORED
    assert torch.equal(batch.targets[chosen], tokens[chosen])
    assert torch.equal(batch.inputs[~chosen], tokens[~chosen])
    hidden, same = batch.inputs[chosen] == 257, batch.inputs[chosen] == tokens[chosen]
    shares = [chosen.double().mean(), hidden.double().mean(), same.double().mean()]
    # A random byte is the old one once in 256 times.
    assert torch.allclose(torch.stack(shares), torch.tensor([0.15, 0.8, 0.1 + 0.1 / 256]).double(), atol=0.02)
    assert (task.hide(as_generator(1), tokens, 0.0).targets != IGNORED).sum(1).tolist() == [1] * 400


def test_masked_tests_hide_the_same_whatever_the_batch(file):
    task = text_task("masked-text", data=file, length=32, share=0.3)
    one, two = (list(task.test_batches(size)) for size in (6, 4))
    assert torch.equal(torch.cat([b.inputs for b in one]), torch.cat([b.inputs for b in two]))
    assert sum(len(batch) for batch in one) == 200 // 32
    train = [task.train_batch(8, 0, step) for step in (0, 0, 1)]
    assert torch.equal(train[0].inputs, train[1].inputs)
    assert not torch.equal(train[0].inputs, train[2].inputs)
    shown = torch.where(one[0].targets == IGNORED, one[0].inputs, one[0].targets)
    assert bytes(shown.flatten().tolist()) == CONTENT[3800 : 3800 + 192]


def test_the_passkey_is_found_by_search():
    task = text_task("passkey", length=400)
    batch, depths = task.batch(0, 60), []
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        scored = [target for target in targets if target != IGNORED]
        text = bytes([*tokens, targets[-1]]).decode("ascii")
        needle = re.search(r"One of the special magic numbers for ([a-z-]+) is: (\d{7})\. ", text)
        assert len(re.findall("magic number", text)) == 2
        assert text.endswith(f"The special magic number for {needle[1]} mentioned in the provided text is: {needle[2]}")
        assert bytes(scored).decode() == needle[2]
        assert targets[-7:] == scored
        assert text[needle.start() - 2 : needle.start()] == ". "
        depths.append(needle.start())
    assert min(depths) < 50 < 200 < max(depths)
    right = torch.nn.functional.one_hot(batch.targets.clamp(min=0), 256).float()
    right[:30, -1] = 0
    assert task.metrics(task.score(right, batch))["exact_match"] == 50


@pytest.fixture
def words(tmp_path):
    """A text of 1,000 words, their numbers, and a tokenizer of words that saves itself with a mask token or without."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[UNK]", "[MASK]", *(f"w{n}" for n in range(40))]
    made = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", mask_token="[MASK]")
    fast.save_pretrained(tmp_path / "tokenizer")
    fast.mask_token = None
    fast.save_pretrained(tmp_path / "maskless")
    order = (2 + torch.randint(40, (1000,), generator=as_generator(0))).tolist()
    (tmp_path / "words.txt").write_text(" ".join(names[n] for n in order))
    return {"data": str(tmp_path / "words.txt"), "tokenizer": str(tmp_path / "tokenizer"), "length": 16}, order


def test_a_tokenizer_makes_other_tokens_of_the_same_text(words, tmp_path):
    settings, order = words
    cached = settings | {"cache": str(tmp_path / "cache")}
    for task in (text_task("text", **given) for given in (cached, cached, settings)):
        assert task.vocabulary == 42
        assert task.parts["train"].tokens[:800].tolist() == order[:800]
    assert len(list((tmp_path / "cache").glob("*.int32"))) == 3
    assert task.bytes_per_token == pytest.approx(len((tmp_path / "words.txt").read_text()) / 1000, rel=0.1)
    for name in ("train", "validation_matched"):
        lines = [json.dumps({"premise": "w1 w2", "hypothesis": f"w{n}", "label": n % 3}) for n in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    for name, given in (("masked-text", settings), ("glue", settings | {"data": str(tmp_path)})):
        assert text_task(name, **given).vocabulary == 42
        # It hides behind an id of its own.
        assert text_task(name, **given | {"tokenizer": str(tmp_path / "maskless")}).vocabulary == 44
    batch = next(text_task("glue", **settings | {"data": str(tmp_path), "length": 8}).test_batches(6))
    assert batch.inputs[:, :3].tolist() == [[3, 4, 2 + n] for n in range(6)]
    assert batch.key_mask.sum(1).tolist() == [3] * 6
    assert batch.targets.tolist() == [0, 1, 2, 0, 1, 2]


def test_the_cache_of_tokens_knows_tokenizers_by_all_their_files(tmp_path):
    """Some have their words in a file of their own beside two that are alike."""
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("abcd dcba " * 100)
    found = []
    for letters in ("abcd", "dcba"):
        (tmp_path / letters).mkdir()
        names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
        (tmp_path / letters / "vocab.txt").write_text("\n".join(names))
        (tmp_path / letters / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
        settings = {"data": str(tmp_path / "text.txt"), "length": 8, "tokenizer": str(tmp_path / letters)}
        made = [text_task("text", **settings, **cache) for cache in ({"cache": str(tmp_path / "cache")}, {})]
        found += [task.parts["train"].tokens[:8].tolist() for task in made]
    assert found[0] == found[1] != found[2] == found[3]


def test_data_are_known_by_what_they_hold(tmp_path):
    (tmp_path / "a.txt").write_text("text some")
    other = content_digest([tmp_path])
    (tmp_path / "a.txt").write_text("some text")  # as long as before
    before = content_digest([tmp_path])
    assert before != other
    (tmp_path / "model.safetensors").write_text("weights beside a tokenizer")
    (tmp_path / "no.txt").mkdir()
    assert content_digest([tmp_path]) == before
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")  # texts are read in the order of their names
    assert content_digest([tmp_path]) != before
    assert text_task("mqar").content is None
    task = text_task("text", data=str(tmp_path / "b.txt"), length=2, valid=0.0, test=0.5)
    assert task.identity()["content"] == content_digest([tmp_path / "b.txt"])
