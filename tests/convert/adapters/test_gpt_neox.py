"""GPT-NeoX: rotary positions on a part of the channels, both residual layouts."""

import pytest
from torch.testing import assert_close

pytest.importorskip("transformers")

from tests.convert.adapters import families

from linattn.convert.plan import LayerShape

CALL = families.real_logits(families.draw(9, 5))


def build(**changes):
    return families.build("GPTNeoXForCausalLM", intermediate_size=48, **changes)


@pytest.fixture(scope="module")
def model():
    return build()


def test_sites(model):
    names = [f"gpt_neox.layers.{i}.attention" for i in range(2)]
    families.check_parts(model, names, LayerShape(4, 4, 8, 32, causal=True))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_teacher_mode_is_the_model(share):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    model = build(rope_parameters=rope, use_parallel_residual=share < 1)
    assert model.gpt_neox.layers[0].attention.rotary_ndims == 8 * share
    families.check_teacher(model, CALL)


def test_features_change_the_attention_and_no_weight(model):
    families.check_features(model, CALL)


def test_zeros_softmax_starts_without_loss(model):
    families.check_lossless_start(model, CALL)


@pytest.mark.parametrize("options", families.MECHANISMS, ids=lambda options: options["mechanism"])
def test_generation(model, options):
    families.check_generation(families.converted(model, "features", **options))


def test_generation_with_a_window(model):
    families.check_generation(families.converted(model, "still", window=4, ratio=0.25, sinks=1))


def test_positions_count_from_the_first_real_token(model):
    """Features of turned keys depend on where counting starts, unlike softmax."""
    student = families.converted(model, "features", mechanism="elu")
    ids, mask = families.left_padded(families.draw(9, 5))
    padded = student(ids, attention_mask=mask, use_cache=False).logits
    assert_close(padded[1, 4:], student(ids[1:, 4:], use_cache=False).logits[0], **families.TOLERANCE)
