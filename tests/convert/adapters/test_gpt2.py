"""GPT-2: parts of its attention, and what a converted one gives."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers")

from tests.convert.adapters import families

from linattn.convert.plan import LayerShape

CALL = families.real_logits(families.draw(9, 5))


@pytest.fixture(scope="module")
def model():
    return families.build("GPT2LMHeadModel", n_positions=32, scale_attn_by_inverse_layer_idx=True)


def test_sites_are_found_in_the_model_and_in_its_body(model):
    shape = LayerShape(4, 4, 8, 32, causal=True)
    families.check_parts(model, ["transformer.h.0.attn", "transformer.h.1.attn"], shape)
    families.check_parts(model.transformer, ["h.0.attn", "h.1.attn"], shape)


def test_learned_positions_end(model):
    families.check_most_tokens(model, 32)


def test_teacher_mode_is_the_model(model):
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


def test_packed_sequences_are_refused(model):
    student = families.converted(model, "features", mechanism="elu")
    ids, positions = families.draw(6)[0][None], torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="packed sequences"):
        student(ids, position_ids=positions, use_cache=False)


def test_beams_carry_their_states(model):
    """The score of every beam is that of its text read at once."""
    student = families.converted(model, "features", mechanism="elu")
    student.generation_config.eos_token_id = None
    ids, mask = families.left_padded(families.draw(7, 4))
    options = {
        "attention_mask": mask,
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 5,
        "pad_token_id": 0,
    }
    out = student.generate(ids, do_sample=False, return_dict_in_generate=True, output_scores=True, **options)
    full = torch.cat([mask.repeat_interleave(3, 0), mask.new_ones(6, 5)], dim=1)
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    logits = student(out.sequences, attention_mask=full, position_ids=positions, use_cache=False).logits
    steps = logits[:, 6:-1].log_softmax(-1).gather(-1, out.sequences[:, 7:, None])
    assert_close(out.sequences_scores.double() * 5, steps.sum((1, 2)), rtol=1e-5, atol=1e-5)
