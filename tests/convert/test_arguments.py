"""A wrong argument is named with what is allowed, and the model is still what it was."""

import pytest
import torch
from tests.convert.tiny import Counted, Letters, llama

import linattn
from linattn.convert.finetune import FinetuneOptions
from linattn.convert.transfer import TransferOptions
from linattn.support.options import OptionError


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"text": "a", "batches": Counted()}, "text: and batches"),
        ({"text": [], "tokenizer": Letters()}, "text: must be a path or a list"),
        ({"text": "nowhere.txt", "tokenizer": Letters()}, "text: .*does not exist"),
        ({"folder": __file__}, "folder: must be a folder"),
        ({"layers": 0}, "layers must be a list of different numbers from 0 to 1"),
        ({"cost": 16}, "cost is no option of method 'still'"),
        ({"method": "dof", "cost": 16, "feature_dim": 8}, "cost: .*feature_dim"),
        ({"method": "dof", "tolerance": 0}, "tolerance: must be above 0"),
        ({"method": "dof", "colour": 8}, "it takes .*cost, clip, tolerance"),
        ({"batches": Counted(), "finetune": FinetuneOptions(targets=("magic",))}, "targets: .*q_proj.*got 'magic'"),
        ({"batches": Counted(), "finetune": FinetuneOptions(recall_share=0.5)}, "recall_share: needs a text"),
        ({"batches": Counted(), "transfer": TransferOptions(tokens=100)}, "tokens: needs a length"),
        ({"batches": Counted(), "transfer": TransferOptions(loss="cross_entropy"), "gate": True}, "loss: must be mse"),
    ],
)
def test_it_is_named_before_any_work(model, arguments, named):
    pytest.importorskip("peft")
    names, weights = list(model.state_dict()), [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=named):
        linattn.linearize(model, **arguments)
    assert list(model.state_dict()) == names
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize(
    ("kind", "option", "value", "rule"),
    [
        (TransferOptions, "length", 1, "at least 2"),
        (FinetuneOptions, "scale_factor", 0, "above 0"),
        (FinetuneOptions, "targets", (), "names in a tuple"),
    ],
)
def test_options_of_stages_are_checked_when_they_are_made(kind, option, value, rule):
    with pytest.raises(OptionError, match=f"^{option}: .*{rule}"):
        kind(**{option: value})
    if kind is FinetuneOptions:
        with pytest.raises(OptionError, match="hidden_weight: needs a teacher"):
            FinetuneOptions(hidden_weight=1.0, objective="next_token")


def test_sequences_are_no_longer_than_learned_positions(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    (tmp_path / "text.txt").write_text("some words " * 100)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    given = {"text": tmp_path / "text.txt", "tokenizer": Letters()}
    with pytest.raises(ValueError, match=r"length: must not exceed the 32 positions .* got 33"):
        linattn.linearize(model, transfer=TransferOptions(length=33), **given)
    assert not hasattr(model, "linearize_report")


@pytest.mark.parametrize(
    ("family", "head"), [("Bert", "Model"), ("Bert", "ForMaskedLM"), ("Llama", "ForSequenceClassification")]
)
def test_the_next_token_is_asked_of_causal_language_models_alone(family, head):
    pytest.importorskip("peft")
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, intermediate_size=16)
    model = getattr(transformers, family + head)(config)
    with pytest.raises(ValueError, match=f"objective: must be distill for {family}{head}, .* got 'next_token'"):
        linattn.linearize(model, "hedgehog", batches=Counted(), finetune=FinetuneOptions(objective="next_token"))
    assert not hasattr(model, "linearize_report")
