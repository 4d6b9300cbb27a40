"""Stage 2: adapters learn the teacher that the same weights are, and leave a plain converted model behind."""

import pytest
import torch
import torch.nn.functional as F
from tests.convert.tiny import Counted, held_out, llama, same

import linattn.convert.finetune as module
from linattn.convert.convert import convert, linearized_layers, plan_model
from linattn.convert.files import load_linearized, save_linearized
from linattn.convert.finetune import (
    FinetuneOptions,
    adapted_model,
    answer_divergence,
    finetune,
    hidden_distance,
    next_token_loss,
    relative_squares,
)

OPTIONS = FinetuneOptions(steps=5, lr=1e-2, checkpoint_steps=2)
IDS = held_out()[0]["input_ids"]


def one_batch(step):
    return {"input_ids": IDS}


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def divergence(model, ids=IDS):
    """From the teacher that the model was at the start, which is what ``llama`` builds."""
    with torch.no_grad():
        return float(answer_divergence(model(ids).logits, llama()(ids).logits, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_comes_closer_to_the_teacher_and_is_a_plain_model_again(dtype, tmp_path):
    model = llama("lolcats", dtype)
    kinds, before = [type(module) for module in model.modules()], weights(model)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    start = divergence(model)
    losses = finetune(model, one_batch, FinetuneOptions(steps=12, lr=1e-2))
    assert divergence(model) < 0.8 * start
    assert losses[0] == pytest.approx(start, rel=1e-3 if dtype == torch.float32 else 0.1)
    after = weights(model)
    assert [type(module) for module in model.modules()] == kinds
    assert after.keys() == before.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(after[name], before[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert wanted == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    save_linearized(model, tmp_path / "model")
    loaded = load_linearized(tmp_path / "model", dtype=dtype)
    assert same(weights(loaded), after)
    if dtype == torch.float32:  # frequencies of rotary positions, no weights, are 16 bits in the one of the others
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_scales_of_cores_learn_at_a_rate_of_their_own():
    """The first step of Adam is the learning rate, whatever the gradient."""
    model = llama("lolcats")
    core = linearized_layers(model)[0].core
    before = core.log_weight.detach().clone(), core.features.key_map.weight.detach().clone()
    finetune(model, one_batch, FinetuneOptions(steps=1, lr=1e-3, train_cores=True, scale_factor=20, clip_norm=None))
    moved = core.log_weight - before[0], core.features.key_map.weight - before[1]
    torch.testing.assert_close(moved[0].abs(), torch.full((4,), 0.02), rtol=1e-3, atol=0)
    assert float(moved[1].detach().abs().max()) == pytest.approx(1e-3, rel=1e-3)


def test_the_losses_are_those_of_the_teacher_and_of_the_text():
    first = {}
    for objective in ("distill", "next_token"):
        options = FinetuneOptions(steps=1, objective=objective)
        first[objective] = finetune(llama("lolcats"), one_batch, options)[0]
    with torch.no_grad():
        logits = llama("lolcats")(IDS).logits
    assert first["distill"] == pytest.approx(divergence(llama("lolcats")), rel=1e-5)
    assert first["next_token"] == pytest.approx(float(next_token_loss(logits, IDS, None)), rel=1e-5)


def test_a_run_that_was_stopped_ends_in_the_same_weights(tmp_path):
    whole = llama("lolcats")
    losses = finetune(whole, Counted(), OPTIONS)
    stopped = llama("lolcats")
    with pytest.raises(KeyboardInterrupt):
        finetune(stopped, Counted(stop=3), OPTIONS, tmp_path)
    assert same(weights(stopped), weights(llama("lolcats")))  # the adapters are off, nothing was merged
    resumed, batches = llama("lolcats"), Counted()
    assert finetune(resumed, batches, OPTIONS, tmp_path) == losses
    assert batches.asked == [2, 3, 4]
    assert same(weights(resumed), weights(whole))
    again, batches = llama("lolcats"), Counted()
    assert finetune(again, batches, OPTIONS, tmp_path) == losses
    assert batches.asked == []
    assert same(weights(again), weights(whole))


def test_cores_learn_where_they_may_and_come_back_when_it_is_stopped():
    options = FinetuneOptions(steps=3, lr=1e-2, train_cores=True)
    before, model = weights(llama("lolcats")), llama("lolcats")
    with pytest.raises(KeyboardInterrupt):
        finetune(model, Counted(stop=2), options)
    assert same(weights(model), before)
    finetune(model, Counted(), options)
    name = "model.layers.1.self_attn.core.features.key_map.weight"
    assert not torch.equal(weights(model)[name], before[name])


def test_an_encoder_learns_the_hidden_states_of_its_teacher_and_padding_does_not_count():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=32, max_position_embeddings=64, initializer_range=0.3, **sizes)
    model = BertModel(config, add_pooling_layer=False).eval()
    mask = torch.arange(IDS.shape[1]) < torch.tensor([48, 20, 30, 40])[:, None]
    batch = {"input_ids": IDS, "attention_mask": mask.long()}
    with torch.no_grad():
        teacher = model(**batch).last_hidden_state
    convert(model, plan_model(model, "hedgehog"))

    def distance():
        with torch.no_grad():
            student = model(**batch).last_hidden_state
        student[~mask] = 1e3
        return float(hidden_distance(student, teacher, batch["attention_mask"]))

    start = distance()
    losses = finetune(model, lambda step: batch, FinetuneOptions(steps=10, lr=1e-2))
    assert losses[0] == pytest.approx(start, rel=1e-4)
    assert distance() < 0.8 * start


def test_hidden_states_after_every_layer_are_distilled_where_asked_for():
    def states(model):
        with torch.no_grad():
            return model(IDS, output_hidden_states=True).hidden_states[1:]

    taught = states(llama())
    plain, deep = llama("lolcats"), llama("lolcats")
    missed = torch.stack([relative_squares(*pair, None) for pair in zip(states(plain), taught, strict=True)]).mean()
    answer = finetune(plain, one_batch, FinetuneOptions(steps=12, lr=1e-2))[0]
    losses = finetune(deep, one_batch, FinetuneOptions(steps=12, lr=1e-2, hidden_weight=10.0))
    assert losses[0] == pytest.approx(answer + 10 * float(missed), rel=1e-5)
    first = [float(relative_squares(states(model)[0], taught[0], None)) for model in (plain, deep)]
    assert first[1] < 0.9 * first[0]


def test_the_mean_over_tokens_counts_as_much_as_it_is_told_to():
    student, teacher = 0.1 * torch.randn(2, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    rows, squares = [], []
    for i, length in enumerate((5, 3)):
        a, b = student[i, :length], teacher[i, :length]
        rows.append(1 - torch.cosine_similarity(a.mean(0), b.mean(0), dim=0))
        squares.append((a - b).square().sum(-1) / b.square().sum(-1))
    expected = torch.cat(squares).mean() + 3 * torch.stack(rows).mean()
    assert float(hidden_distance(student, teacher, mask, 3.0)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_divergence_in_parts_is_that_of_the_whole_with_its_gradient(dtype, monkeypatch):
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 7, 11).to(dtype).unbind()
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    exact = student.double().clone().requires_grad_(True)
    rows = F.kl_div(exact.log_softmax(-1), teacher.double().log_softmax(-1), reduction="none", log_target=True).sum(-1)
    whole = (rows * mask).sum() / mask.sum()
    whole.backward()
    monkeypatch.setattr(module, "MOST_LOGITS", 50)  # four rows at a time, and one that is left
    given = student.clone().requires_grad_(True)
    loss = answer_divergence(given, teacher, mask)
    (3 * loss).backward()
    eps = torch.finfo(dtype).eps
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert given.grad.dtype == dtype
    assert (given.grad.double() / 3 - exact.grad).abs().max() <= 2 * eps * exact.grad.abs().max()
    with torch.no_grad():
        assert answer_divergence(student, teacher, mask) == loss
    pictures = answer_divergence(student[0], teacher[0], None)  # (B, classes)
    assert pictures.item() == pytest.approx(rows[0].mean().item(), rel=1e-6)


def test_the_teacher_has_no_adapters_and_the_student_has_them_again():
    model = llama()
    convert(model, plan_model(model, "lolcats", window=4))
    with torch.no_grad(), adapted_model(model, FinetuneOptions(rank=2, alpha=2.0, train_cores=True)) as adapted:
        learned = adapted.parameters()
        for parameter in learned.values():
            parameter.add_(0.3)
        student = model(IDS).logits
        assert torch.equal(adapted.answer_as("teacher", one_batch(0)).logits, llama()(IDS).logits)
        assert torch.equal(adapted.answer_as("student", one_batch(0)).logits, student)
        assert adapted.parameters().keys() == learned.keys()
