"""Losses, gradients and what each head sees."""

import pytest
import torch
import torch.nn.functional as F

from linattn import list_mechanisms
from models.language.small import TOLERANCE, VOCABULARY, build, draw, left_padded

pytest.importorskip("transformers", reason="the extra hf is not installed")


def test_the_loss_of_the_next_token():
    """In fp32 also for a model in bf16, shifted by one, without the ignored."""
    model, ids = build(canon="ABCD").bfloat16(), draw()
    labels = ids.clone()
    labels[0, 3:6] = -100
    out = model(ids, labels=labels)
    logits, targets = out.logits[:, :-1].float(), labels[:, 1:]
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    real = targets != -100
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, losses[real].mean())
    summed = model(ids, labels=labels, num_items_in_batch=100).loss  # what Trainer asks for
    torch.testing.assert_close(summed, losses[real].sum() / 100)


@pytest.mark.parametrize("mechanism", ["elu", "gated", "softmax"])
def test_only_encoders_see_the_future(mechanism):
    ids = draw()
    other = ids.clone()
    other[:, 8:] = draw(seed=5)[:, 8:]
    for head, causal in (("ForCausalLM", True), ("ForMaskedLM", False)):
        model = build(head, mechanism=mechanism, canon="ABCD", causal=causal)
        moved = (model(ids).logits - model(other).logits)[:, :8].abs().amax(-1)
        assert moved.max() < 1e-10 if causal else moved.min() > 1e-6


@pytest.mark.parametrize("mechanism", list_mechanisms(bidirectional=True))
def test_padding_changes_no_masked_token(mechanism):
    """On either side: an encoder's positions are counted over real tokens."""
    model, row = build("ForMaskedLM", mechanism=mechanism, causal=False, canon="A"), draw(1, 6)
    alone = model(row).logits[0]
    ids, mask = left_padded([row[0], draw(1, 9, seed=4)[0]], 9)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[0, 3:], alone, **TOLERANCE)
    ids, mask = ids.roll(-3, 1), mask.roll(-3, 1)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[0, :6], alone, **TOLERANCE)


def test_the_loss_of_masked_tokens():
    model, ids = build("ForMaskedLM", causal=False), draw()
    labels = torch.full_like(ids, -100)
    labels[:, 2:4] = ids[:, 2:4]
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, 2:4].float().flatten(0, 1), ids[:, 2:4].flatten())
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize(("causal", "pooling"), [(True, None), (False, None), (True, "mean"), (False, "last")])
def test_classes_are_read_from_real_tokens(causal, pooling):
    model = build("ForSequenceClassification", causal=causal, pooling=pooling, canon="AC", num_labels=3)
    rows = [draw(1, length, seed=length)[0] for length in (4, 9)]
    ids, mask = left_padded(rows, 9)
    labels = torch.tensor([2, 0])
    out = model(ids, attention_mask=mask, labels=labels)
    alone = torch.cat([model(row[None]).logits for row in rows])
    torch.testing.assert_close(out.logits, alone, **TOLERANCE)
    torch.testing.assert_close(out.loss, F.cross_entropy(alone.float(), labels))
    right = torch.stack([torch.cat([rows[0], rows[0].new_zeros(5)]), rows[1]])
    real = torch.tensor([[1] * 4 + [0] * 5, [1] * 9])
    torch.testing.assert_close(model(right, attention_mask=real).logits, alone, **TOLERANCE)
    hidden = model.model(rows[1][None]).last_hidden_state[0]
    pooled = hidden[-1] if (pooling or ("last" if causal else "mean")) == "last" else hidden.mean(0)
    torch.testing.assert_close(alone[1], model.score(pooled), **TOLERANCE)


@pytest.mark.parametrize("mechanism", ["softmax", "elu", "gated"])
def test_gradient_checkpointing_changes_no_gradient(mechanism):
    model, ids = build(mechanism=mechanism, canon="ABCD"), draw()
    model.train()
    runs = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        assert out.past_key_values is None
        runs.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in runs[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(runs[1][name], gradient, **TOLERANCE)


def test_no_cache_while_blocks_are_computed_twice():
    model, ids = build(), draw()
    cache = model(ids, use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="exclude one another"):
        model(ids, past_key_values=cache)


def test_compiles_as_one_graph():
    model, ids = build(mechanism=["elu", "softmax"], canon="ABCD"), draw()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for options in ({}, {"attention_mask": mask}):
        found = compiled(ids, use_cache=False, **options).logits
        expected = model(ids, use_cache=False, **options).logits
        real = options.get("attention_mask", torch.ones_like(ids)).bool()
        torch.testing.assert_close(found[real], expected[real], **TOLERANCE)


def test_hidden_states_tuples_and_embeddings():
    model, ids = build(num_hidden_layers=2), draw()
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(ids))
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits, **TOLERANCE)  # after the norm
    torch.testing.assert_close(model(ids, return_dict=False, use_cache=False)[0], out.logits, **TOLERANCE)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(embedded, out.logits, **TOLERANCE)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, out.logits[:, -2:], **TOLERANCE)
    assert out.logits.shape == (2, 11, VOCABULARY)


def test_heads_and_configs_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="ForCausalLM needs causal=True"):
        build(causal=False)
    with pytest.raises(ValueError, match="ForMaskedLM needs causal=False"):
        build("ForMaskedLM")
    encoder = build("Model", causal=False)
    assert encoder(draw()).past_key_values is None
    with pytest.raises(ValueError, match="past_key_values needs causal=True"):
        encoder(draw(), past_key_values=build()(draw(), use_cache=True).past_key_values)
