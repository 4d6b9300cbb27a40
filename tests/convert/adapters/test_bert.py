"""BERT and its kin: bidirectional, padded on the right; a decoder is causal."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers")

from tests.convert.adapters import families

from linattn.convert.adapters import find_adapter
from linattn.convert.plan import LayerShape

FAMILIES = ("BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel", "ElectraModel")
IDS = torch.stack(families.draw(8, 8)) % 36 + 3  # below 3 are special tokens, which RoBERTa counts no position for
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def build(name, **changes):
    return families.build(name, intermediate_size=48, **changes)


def call(model):
    return model(IDS, attention_mask=MASK).last_hidden_state[MASK.bool()]


@pytest.fixture(scope="module")
def model():
    return build("BertModel")


@pytest.mark.parametrize("name", FAMILIES)
def test_learned_positions_end(name):
    behind = 0 if name in ("BertModel", "ElectraModel") else 2  # the number of padding, which is 1
    families.check_most_tokens(build(name, max_position_embeddings=20), 20 - behind)


@pytest.mark.parametrize("name", FAMILIES)
def test_teacher_mode_is_the_model(name):
    model = build(name)
    names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    families.check_parts(model, names, LayerShape(4, 4, 8, 32, causal=False))
    families.check_teacher(model, call)


def test_features_change_the_attention_and_no_weight(model):
    families.check_features(model, call)


def test_zeros_softmax_starts_without_loss(model):
    families.check_lossless_start(model, call)


@pytest.mark.parametrize("options", families.MECHANISMS, ids=lambda options: options["mechanism"])
def test_a_padded_batch_is_its_rows_one_by_one(model, options):
    student = families.converted(model, "features", **options)
    padded = student(IDS, attention_mask=MASK).last_hidden_state
    assert_close(padded[0], student(IDS[:1]).last_hidden_state[0], **families.TOLERANCE)
    assert_close(padded[1, :5], student(IDS[1:, :5]).last_hidden_state[0], **families.TOLERANCE)


@pytest.mark.parametrize("method", ["still", "lolcats"])
def test_a_window_of_past_tokens_is_refused(model, method):
    with pytest.raises(ValueError, match="bidirectional"):
        families.converted(model, method)


def test_a_decoder_is_causal_and_generates():
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**families.SIZES, intermediate_size=48, is_decoder=True)
    decoder = transformers.BertLMHeadModel(config).double().eval()
    student = families.converted(decoder, "features", mechanism="elu")
    assert find_adapter(student).sites(student)[0].shape.causal
    families.check_generation(student)
