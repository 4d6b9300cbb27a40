"""Learned positions: a vector for each, wherever the tokens stand in a batch or in a text that comes in pieces."""

import pytest
import torch

from models.language.small import TOLERANCE, build, draw, left_padded

pytest.importorskip("transformers", reason="the extra hf is not installed")


def placed(head="ForCausalLM", length=16, **changes):
    return build(head, max_position_embeddings=length, rotary=0.0, **changes)


def test_each_position_adds_its_vector():
    model, ids = placed(), draw()
    assert model.model.embed_positions.weight.shape == (16, 32)
    vectors = model.model.embed_tokens(ids) + model.model.embed_positions.weight[: ids.shape[1]]
    plain = build(rotary=0.0)
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if "embed_positions" not in name})
    torch.testing.assert_close(model(ids).logits, plain(inputs_embeds=vectors).logits, **TOLERANCE)
    assert plain.model.embed_positions is None


def test_a_text_that_has_no_place_is_refused():
    model, ids = placed(length=11), draw()
    message = "must not go beyond max_position_embeddings = 11 tokens, what came before included, got 12"
    with pytest.raises(ValueError, match=message):
        model(torch.cat([ids, ids[:, :1]], dim=1))
    past = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=message):
        model(ids[:, :1], past_key_values=past)
    padded, mask = left_padded([ids[0, :3], ids[1]], 11)
    longer = [torch.cat([torch.zeros_like(part[:, :2]), part], dim=1) for part in (padded, mask)]
    torch.testing.assert_close(  # 13 places in a row, of which 11 are tokens
        model(longer[0], attention_mask=longer[1]).logits[:, -3:], model(padded, attention_mask=mask).logits[:, -3:],
        **TOLERANCE,
    )  # fmt: skip


def test_compiled_code_tells_a_long_row_from_a_long_document():
    """It cannot look at positions: what may be short enough is asked of the device."""
    model, ids = placed(length=6), draw(1, 9)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    apart = torch.cat([model(part).logits for part in ids.split([4, 5], dim=1)], dim=1)  # each begins anew
    for call in (model, compiled):
        found = call(ids, cu_seqlens=torch.tensor([0, 4, 9]), use_cache=False).logits
        torch.testing.assert_close(found, apart, **TOLERANCE)
    with pytest.raises(RuntimeError, match="must not go beyond max_position_embeddings = 6 tokens"):
        compiled(ids, cu_seqlens=torch.tensor([0, 2, 9]), use_cache=False)
