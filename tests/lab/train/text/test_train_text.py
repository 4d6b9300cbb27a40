"""A run does what torch alone would do, and what is told of it is what the stored weights give."""

from dataclasses import replace
from math import log

import pytest
import torch
import torch.nn.functional as F
from tests.lab.train.text.small_text import CONFIG, HOST, TASK, run
from torch.optim import AdamW

from linattn.lab.tasks.text import text_task
from linattn.lab.train import rounds
from linattn.lab.train.accelerator import split_by_decay
from linattn.lab.train.rounds import DivergedError
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.feed import Feed
from linattn.lab.train.text.hosts import Host, create_host
from linattn.lab.train.text.loop import TextNetwork
from linattn.models.language import LinearAttentionForCausalLM
from linattn.support.options import OptionError
from linattn.support.schedule import warmed_cosine, warmed_line


def test_softmax_with_canon_solves_recall(tmp_path):
    """Without recall the best guess is one of the four values of the sequence: log 4 nats, 25 %."""
    task = text_task("mqar", vocab=32, length=16, pairs=4, test_examples=100)
    config = TextConfig(steps=90, batch_size=32, lr=1e-2, warmup_steps=10, weight_decay=0.0, eval_every=30)
    host = Host(size="pico", mechanism="softmax", canon="B", width=32, depth=1)
    _, result = run(tmp_path, config, host, task)
    assert result.records[0].train_loss > 0.5 * log(4)
    assert result.score > 90
    assert result.records[-1].metrics["loss"] < 0.25 * log(4)
    # what was told is what the stored checkpoint gives, on other batches and by other sums
    model = LinearAttentionForCausalLM.from_pretrained(tmp_path)
    batch = next(task.test_batches(100))
    with torch.no_grad():
        logits = model(batch.inputs).logits
    scored = batch.targets != -100
    assert scored.sum() == 400
    hits = (logits.argmax(-1) == batch.targets)[scored].double().mean().item()
    assert result.score == pytest.approx(100 * hits)
    nats = F.cross_entropy(logits[scored].double(), batch.targets[scored]).item()
    assert result.records[-1].metrics["loss"] == pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize(("schedule", "eps"), [("cosine", 1e-8), ("linear", 1e-3)])
def test_a_run_in_parts_is_what_torch_alone_does(schedule, eps, tmp_path):
    """Decay on matrices, clipped gradients, warm-up and fall, one mean over all that a step scores."""
    config = replace(CONFIG, steps=3, warmup_steps=1, eval_every=0, weight_decay=0.5, clip_norm=0.3)
    config = replace(config, schedule=schedule, eps=eps)
    host = replace(HOST, dropout=0.0)
    ours, _ = run(tmp_path, config, host)
    plain = create_host(host, TASK, config.seed)
    decayed, free = split_by_decay(plain)
    assert "model.embed_tokens.weight" in free
    assert {"lm_head.weight", "model.layers.0.attn.qkv.weight"} <= set(decayed)
    named = dict(plain.named_parameters())
    groups = [{"params": [named[n] for n in decayed], "weight_decay": 0.5}]
    groups.append({"params": [named[n] for n in free], "weight_decay": 0.0})
    optimizer = AdamW(groups, betas=config.betas, eps=eps)
    fall = {"cosine": warmed_cosine, "linear": warmed_line}[schedule]
    for step in range(3):
        batch = TASK.train_batch(8, config.seed, step)
        for group in optimizer.param_groups:
            group["lr"] = fall(step, 3, 1, config.lr, config.min_lr)
        TASK.loss(plain(batch.inputs).logits, batch).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    # Adam divides by the size of the gradient: a relative error of some eps in it moves a weight by as many eps lr.
    for name, weight in plain.named_parameters():
        error = (dict(ours.named_parameters())[name] - weight).abs().max()
        assert error <= 3 * config.lr * 1e-3, name


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return path


@pytest.mark.parametrize("kind", ["causal", "masked", "classification"])
def test_sums_of_the_network_are_the_loss_of_the_task(kind, text_file):
    """Logits are computed where something is scored: the same as if they were computed everywhere."""
    tasks = {
        "causal": lambda: TASK,
        "masked": lambda: text_task("masked-text", data=str(text_file), length=16),
        "classification": lambda: text_task("listops", shortest=3, length=20, test_examples=4),
    }
    task = tasks[kind]()
    assert task.kind == kind
    model = create_host(replace(HOST, canon=None, dropout=0.0), task, 0)
    network = TextNetwork(model, task)
    step = next(Feed(task, replace(CONFIG, accumulation=1), torch.device("cpu")).train())
    (part,) = step.parts
    batch = task.train_batch(8, CONFIG.seed, 0)
    sums = task.score(network.logits(batch), batch)
    loss, hits = network(part.batch, part.rows)
    assert step.total == sums["total"]
    assert (part.rows is None) == (kind == "classification")
    assert loss.item() == pytest.approx(sums["nats"].item(), rel=1e-5)
    assert hits == sums["correct"]
    assert loss.item() / step.total == pytest.approx(task.loss(network.logits(batch), batch).item(), rel=1e-5)


def test_processes_share_a_step_and_threads_change_nothing():
    config = replace(CONFIG, accumulation=1)
    whole = Feed(TASK, config, torch.device("cpu"))
    shares = [Feed(TASK, config, torch.device("cpu"), rank=rank, processes=2) for rank in (0, 1)]
    threaded = Feed(TASK, config, torch.device("cpu"))
    threaded.threads = 3
    steps = threaded.train(4)
    for number in range(4, 9):
        step, (one,) = next(steps), next(whole.train(number)).parts
        assert torch.equal(step.parts[0].batch.inputs, one.batch.inputs)
        halves = [next(share.train(number)) for share in shares]
        assert [half.total for half in halves] == [step.total] * 2
        assert torch.equal(torch.cat([half.parts[0].batch.inputs for half in halves]), one.batch.inputs)
    steps.close()
    with pytest.raises(OptionError, match="3 processes"):
        Feed(TASK, config, torch.device("cpu"), rank=0, processes=3)


def test_divergence_names_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "SECONDS_BETWEEN_READINGS", 0.0)
    forward = TextNetwork.forward
    calls = []

    def broken(self, *args):
        calls.append(1)
        loss, hits = forward(self, *args)
        return (loss * float("nan") if len(calls) > 4 * CONFIG.accumulation else loss), hits

    monkeypatch.setattr(TextNetwork, "forward", broken)
    with pytest.raises(DivergedError, match=r"not finite: step 4, learning rate"):
        run(tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 1, "of the evaluation before"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation": 3}, "accumulation: must divide"),
        ({"warmup_steps": 8}, "warmup_steps: must not exceed"),
        ({"min_lr": 1.0}, "min_lr: must not exceed"),
        ({"graphs": True}, "graphs: CUDA graphs need a GPU"),
        ({"device": "tpu"}, "device: must be one of cpu, cuda"),
    ],
)
def test_a_wrong_config_is_named_when_it_is_made(changes, words):
    with pytest.raises(OptionError, match=words):
        replace(CONFIG, **changes)
