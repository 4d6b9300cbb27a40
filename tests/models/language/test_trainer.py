"""Trainer of transformers takes the model as it is."""

import pytest
import torch

from models.language.small import VOCABULARY, build, left_padded

pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra train is not installed")

STEPS = 30


def sentences(count=16, length=10):
    """Each token is the one before plus 3: a bigram that a model learns in a few steps."""
    starts = torch.arange(1, count + 1)
    return [(start + 3 * torch.arange(length)) % (VOCABULARY - 1) + 1 for start in starts]


def collate(rows):
    """Rows of different lengths, padded on the left; padding has no label."""
    rows = [row[: 10 - i % 3] for i, row in enumerate(rows)]
    ids, mask = left_padded(rows, 10)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_training_evaluation_and_checkpoints(tmp_path):
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = build(mechanism=["gated", "softmax"], canon="ABCD", initializer_range=0.02).float()
    arguments = TrainingArguments(
        tmp_path, max_steps=STEPS, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2,
        report_to=[], save_steps=STEPS, disable_tqdm=True, use_cpu=True, seed=0, remove_unused_columns=False,
        label_names=["labels"], dataloader_pin_memory=False,
    )  # fmt: skip
    data = sentences()
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.1)  # nothing is known yet
    assert after < 0.5 * before
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
