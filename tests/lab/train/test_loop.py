"""The loop against a plain one, and what it promises its callers."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.lab.train.small_run import CONFIG, STEPS, SmallBatches, create_net, log_without_seconds, run
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.lab.train import rounds
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import EpochRecord, Run, train
from linattn.lab.train.rounds import DivergedError
from linattn.support import extras
from linattn.support.compiling import compile_blocks
from linattn.support.options import OptionError
from linattn.support.schedule import warmed_cosine
from linattn.support.seeds import seed_step


def train_plainly(config):
    """Torch alone, nothing of the loop but the seeds and the batches; the network and its averaged weights."""
    net, batches = create_net(), SmallBatches(config)
    weights = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, betas=config.betas)
    average = [p.detach().clone() for p in net.parameters()]
    net.train()
    for epoch in range(config.epochs):
        iterator = batches.train(epoch)
        for step in range(STEPS):
            done, ramp = epoch * STEPS + step + 1, config.warmup_epochs * STEPS
            turn = (done - ramp) / (config.epochs * STEPS - ramp)
            fall = config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * turn)) / 2
            for group in optimizer.param_groups:
                group["lr"] = config.lr * done / ramp if done <= ramp else fall
            seed_step(config.seed, epoch, step, 0)
            images, labels = next(iterator)
            loss = F.cross_entropy(net(images), labels, label_smoothing=config.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            if config.clip_norm is not None:
                norm = sum(p.grad.square().sum() for p in net.parameters()).sqrt()
                for p in net.parameters():
                    p.grad.mul_(min(1.0, config.clip_norm / (norm.item() + 1e-6)))
            optimizer.step()
            for a, p in zip(average, net.parameters(), strict=True):
                a.mul_(config.ema_decay).add_(p.detach(), alpha=1 - config.ema_decay)
    return average


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_it_does_what_a_plain_loop_does(tmp_path, clip_norm):
    config = replace(CONFIG, clip_norm=clip_norm)
    net, _ = run(tmp_path, config)
    # Rounding enters by the norm and the average; Adam makes of it at most eps lr a step and weight. 16 for the sums.
    tolerance = 16 * torch.finfo(torch.float32).eps * config.epochs * STEPS
    for ours, plain in zip(net.parameters(), train_plainly(config), strict=True):
        torch.testing.assert_close(ours.detach(), plain, rtol=tolerance, atol=tolerance)


def test_same_seed_same_bits_other_seed_other_weights(tmp_path):
    first, _ = run(tmp_path / "first")
    torch.rand(3)  # whatever was drawn before does not matter
    again, _ = run(tmp_path / "again")
    other, _ = run(tmp_path / "other", replace(CONFIG, seed=6))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert log_without_seconds(tmp_path / "first") == log_without_seconds(tmp_path / "again")


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_what_is_reported_is_what_the_kept_weights_give(tmp_path, ema_decay):
    config = replace(CONFIG, ema_decay=ema_decay, epochs=4)
    net, result = run(tmp_path, config)
    kept = create_net(seed=99)
    kept.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    batches = SmallBatches()
    kept.eval()
    with torch.no_grad():
        for model in (net, kept):
            logits = model(batches.images)
            top1 = 100 * (logits.argmax(1) == batches.labels).double().mean()
            assert result.top1 == pytest.approx(top1.item())
            assert result.epochs[-1].test_loss == pytest.approx(
                F.cross_entropy(logits, batches.labels).item(), rel=1e-5
            )
    assert result.top1 > 50, "three classes of separable points"
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [EpochRecord(**json.loads(line)) for line in lines] == result.epochs
    assert [record.epoch for record in result.epochs] == [0, 1, 2, 3]
    assert result.epochs[-1].lr == pytest.approx(config.min_lr)
    assert result.seconds == pytest.approx(sum(record.seconds for record in result.epochs))


def test_on_step_sees_the_epoch_grow_and_ends_with_its_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "SECONDS_BETWEEN_READINGS", 0.0)
    steps, epochs = [], []
    _, result = run(tmp_path, on_step=lambda *values: steps.append(values), on_epoch=epochs.append)
    assert epochs == result.epochs
    for epoch in range(CONFIG.epochs):
        mine = [values for values in steps if values[0] == epoch]
        assert [values[1] for values in mine] == [*range(1, STEPS + 1), STEPS]
        assert mine[-1][2] == pytest.approx(result.epochs[epoch].train_loss)
        assert 0 <= mine[-1][3] <= 100


class CountReads(TorchDispatchMode):
    """How often a number is fetched out of a tensor: on a GPU each time waits for all that was started."""

    def __init__(self):
        super().__init__()
        self.reads, self.optimizing = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and not self.optimizing:
            self.reads += 1
        return function(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device(tmp_path, monkeypatch):
    """Between two readings nothing is read. The optimiser is left out: on the CPU it reads its own counter of steps,
    which the fused one of a GPU does not."""
    monkeypatch.setattr(rounds, "SECONDS_BETWEEN_READINGS", math.inf)
    one_step = Run.train_step
    counter = CountReads()

    def counted(self, batches):
        with counter:
            one_step(self, batches)

    monkeypatch.setattr(Run, "train_step", counted)
    before = register_optimizer_step_pre_hook(lambda *_: setattr(counter, "optimizing", True))
    after = register_optimizer_step_post_hook(lambda *_: setattr(counter, "optimizing", False))
    run(tmp_path, on_step=lambda *_: None)
    before.remove()
    after.remove()
    assert counter.reads == 0
    with counter:
        torch.ones(1).item()
    assert counter.reads == 1, "the counter counts"


class Poisoned(SmallBatches):
    """No number from step 2 of epoch 1 on."""

    def train(self, epoch, first_step=0):
        for step, (images, labels) in enumerate(super().train(epoch, first_step), first_step):
            yield (images * math.nan if (epoch, step) >= (1, 2) else images), labels


def test_a_loss_that_is_no_number_stops_and_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "SECONDS_BETWEEN_READINGS", 0.0)
    rate = warmed_cosine(STEPS + 2, 3 * STEPS, STEPS, CONFIG.lr, CONFIG.min_lr)
    with pytest.raises(DivergedError, match=rf"epoch 1, step 2, learning rate {rate:g}"):
        run(tmp_path, batches=Poisoned())
    assert len(log_without_seconds(tmp_path)) == 1
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 1


def test_a_test_loss_that_is_no_number_stops_too(tmp_path):
    batches = SmallBatches()
    batches.test = lambda: iter([(batches.images * math.nan, batches.labels)])
    with pytest.raises(DivergedError, match="test loss"):
        run(tmp_path, batches=batches)
    assert not (tmp_path / "log.jsonl").exists()


def test_bf16_computes_in_bf16_and_leaves_the_model_plain(tmp_path):
    config, net = replace(CONFIG, precision="bf16"), create_net()
    seen = set()
    handle = net.blocks[0][1].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    _, result = run(tmp_path / "bf16", config, net)
    handle.remove()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert "forward" not in vars(net)
    assert net(SmallBatches().images).dtype == torch.float32
    _, exact = run(tmp_path / "fp32")
    # eight bits of mantissa in every layer, and both have learnt the same
    assert result.epochs[-1].train_loss == pytest.approx(exact.epochs[-1].train_loss, rel=0.05)
    assert result.epochs[-1].train_loss != exact.epochs[-1].train_loss


def test_compiled_blocks_train_the_same_and_keep_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "compile_blocks", partial(compile_blocks, backend="eager"))
    plain, _ = run(tmp_path / "plain", net=create_net(dropout=0))
    compiled, _ = run(tmp_path / "compiled", replace(CONFIG, compile=True), net=create_net(dropout=0))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)
    names = torch.load(tmp_path / "compiled" / "weights.pt", weights_only=True).keys()
    assert names == plain.state_dict().keys()


def test_bad_settings_are_told_before_any_work(tmp_path, monkeypatch):
    folder = tmp_path / "new"
    with pytest.raises(OptionError, match="lr"):
        run(folder, replace(CONFIG, lr=-1.0))
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(extras.MissingExtraError, match=r"linattn\[lab\]"):
        run(folder)
    assert not folder.exists()


def test_the_digits_are_learnt_and_resumed_with_the_real_batches(tmp_path):
    from linattn.lab.tasks.load import load_images
    from linattn.lab.train.batches import create_batches
    from linattn.models.vision import create_vit

    data = load_images("digits").subset(train=320, test=100, seed=0)
    config = TrainConfig(epochs=2, batch_size=32, lr=3e-3, mixup=0.2, crop_padding=1, checkpoint_seconds=1e-9)
    device = torch.device("cpu")

    def fresh():
        torch.manual_seed(config.seed)
        return create_vit("digits", "nala", patch_size=4, drop_path_rate=0.1), create_batches(data, config, device)

    whole, batches = fresh()
    train(whole, batches, config, tmp_path / "whole")
    stopped, batches = fresh()

    def stop(epoch, step, loss, accuracy):
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(stopped, batches, config, tmp_path / "stopped", on_step=stop)
    stopped, batches = fresh()
    train(stopped, batches, config, tmp_path / "stopped")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), stopped.parameters(), strict=True))
    assert log_without_seconds(tmp_path / "whole") == log_without_seconds(tmp_path / "stopped")
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["epochs"][1]["train_loss"] < result["epochs"][0]["train_loss"]
