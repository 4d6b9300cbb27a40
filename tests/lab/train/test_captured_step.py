"""Recorded steps without a GPU: a recorder that keeps the function stands in for CUDA's, and some that get it wrong."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.lab.train.small_run import CONFIG, STEPS, SmallBatches, log_without_seconds, run
from tests.lab.train.stand_ins import Keeps, Refuses, recorded_with, wrong_replay
from tests.lab.train.text import small_text

from linattn.lab.tasks.text import IGNORED
from linattn.lab.train import rounds
from linattn.lab.train.captured_step import MOST_GRAPHS, CapturedStep, Graph
from linattn.lab.train.loop import Run
from linattn.lab.train.text.feed import rounded_up
from linattn.lab.train.text.loop import TextNetwork

SHORT = replace(CONFIG, epochs=1)
EPOCHS, LAST = CONFIG.epochs, (CONFIG.epochs - 1, STEPS - 2)


def same_weights(ours, theirs):
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return run(folder)[0], log_without_seconds(folder)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    return run(folder, SHORT)[0], log_without_seconds(folder)


def test_recorded_steps_train_the_same_to_the_last_bit(plain, tmp_path, monkeypatch):
    """With dropout, clipping, an average of the weights and a rate that changes: every step but none twice."""
    made = recorded_with(Keeps, monkeypatch)
    net, _ = run(tmp_path)
    assert same_weights(net, plain[0])
    assert log_without_seconds(tmp_path) == plain[1]
    assert [(recorder.recorded, recorder.replays) for recorder in made] == [(1, EPOCHS * STEPS)]


@pytest.mark.parametrize("first", [None, False], ids=["recorded first", "recorded after"])
def test_a_checkpoint_serves_runs_with_graphs_and_without(first, plain, tmp_path, monkeypatch):
    class Stopping(SmallBatches):
        def train(self, epoch, first_step=0):
            for step, batch in enumerate(super().train(epoch, first_step), first_step):
                if (epoch, step) == LAST:
                    raise KeyboardInterrupt
                yield batch

    made = recorded_with(Keeps, monkeypatch)
    config = replace(CONFIG, checkpoint_seconds=1e-9, graphs=first)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, config, batches=Stopping(config))
    net, _ = run(tmp_path, replace(config, graphs=None if first is False else False))
    assert same_weights(net, plain[0])
    assert log_without_seconds(tmp_path) == plain[1]
    assert [recorder.replays for recorder in made] == [2 if first is False else EPOCHS * STEPS - 2]


def test_recorded_steps_on_text_train_the_same_to_the_last_bit(tmp_path, monkeypatch):
    config = replace(small_text.CONFIG, accumulation=1)
    expected, _ = small_text.run(tmp_path / "plain", config)
    made = recorded_with(Keeps, monkeypatch)
    model, result = small_text.run(tmp_path / "recorded", config)
    assert result.graphs == "replayed"
    assert same_weights(model, expected)
    assert small_text.log_without_seconds(tmp_path / "recorded") == small_text.log_without_seconds(tmp_path / "plain")
    assert [(recorder.recorded, recorder.replays) for recorder in made] == [(1, config.steps)]


def test_a_step_that_cannot_be_recorded_is_told_once_and_taken_as_it_is(short, tmp_path, monkeypatch):
    recorded_with(Refuses, monkeypatch)
    with pytest.warns(RuntimeWarning) as told:
        net, _ = run(tmp_path, SHORT)
    words = [str(w.message) for w in told if "CUDA graphs" in str(w.message)]
    assert len(words) == 1
    assert "cannot be recorded (AcceleratorError: operation not permitted when stream is capturing)" in words[0]
    assert same_weights(net, short[0])


@pytest.mark.parametrize("kind", ["nothing", "frozen rate", "frozen draws", "frozen batch", "no average", "no sums"])
def test_a_wrong_replay_is_found_and_undone(kind, short, tmp_path, monkeypatch):
    trained = []
    recorded_with(wrong_replay(kind, trained), monkeypatch)
    begin = Run.batches_from_here
    monkeypatch.setattr(Run, "batches_from_here", lambda self: trained.append(self) or begin(self))
    if kind == "frozen batch":
        monkeypatch.setattr(Graph, "load", lambda graph, inputs: None)
    with pytest.warns(RuntimeWarning, match="a replayed step is not the step") as told:
        net, _ = run(tmp_path, SHORT)
    assert len([w for w in told if "CUDA graphs" in str(w.message)]) == 1
    assert same_weights(net, short[0]), "what the wrong replay did is undone"
    assert log_without_seconds(tmp_path) == short[1]


def counting():
    """A step that adds its input to a sum, recorded by one that keeps it."""
    total = torch.zeros(3)

    def step(given, *_):
        total.add_(given.sum())

    captured = CapturedStep(step, lambda: {"sums": [total]}, "fp32", total.device)
    return captured, captured.recorder, total


def test_each_shape_has_a_graph_and_there_is_an_end_of_them(monkeypatch):
    recorded_with(Keeps, monkeypatch)
    step, recorder, total = counting()
    for size in (4, 4, 3, 4, 3):  # a last smaller batch, and again
        step(torch.ones(size), None)
    assert (recorder.recorded, recorder.replays) == (2, 5)
    step(torch.ones(4), torch.ones(1))  # a mask that was not there
    step(torch.ones(4, dtype=torch.float64), None)
    assert recorder.recorded == MOST_GRAPHS
    with pytest.warns(RuntimeWarning, match="more than 4 shapes"):
        step(torch.ones(5), None)
    step(torch.ones(6), None)
    step(torch.ones(4), None)
    assert (recorder.recorded, recorder.replays) == (MOST_GRAPHS, 8)
    assert total.tolist() == [18.0 + 4 + 4 + 5 + 6 + 4] * 3, "each step once, recorded or not"
    step.forget()
    step(torch.ones(4), None)
    assert recorder.recorded == MOST_GRAPHS + 1


@pytest.mark.parametrize(
    ("processes", "accumulation", "reason"), [(2, 1, "2 processes"), (1, 4, "in 4 parts"), (1, 1, None)]
)
def test_what_speaks_against_graphs_is_told(processes, accumulation, reason, recwarn):
    gpu = SimpleNamespace(device=torch.device("cuda"), num_processes=processes)
    for graphs in (None, True):
        config = SimpleNamespace(graphs=graphs, accumulation=accumulation)
        assert rounds.graphs_wanted(config, gpu) == (reason is None)
    assert all(reason in str(w.message) for w in recwarn)
    assert bool(len(recwarn)) == (reason is not None)
    recwarn.clear()
    assert not rounds.graphs_wanted(SimpleNamespace(graphs=False, accumulation=accumulation), gpu)
    cpu = SimpleNamespace(device=torch.device("cpu"), num_processes=processes)
    assert not rounds.graphs_wanted(SimpleNamespace(graphs=None, accumulation=accumulation), cpu)
    assert len(recwarn) == 0, "what was not asked for needs no reason"


def test_rows_that_fill_up_a_shape_add_nothing():
    """Loss, hits and gradients, in fp64; many counts share few shapes."""
    sizes = set()
    for count in range(1000, 1100):
        scored = torch.zeros(4000, dtype=torch.bool)
        scored[torch.randperm(4000)[:count]] = True
        rows = scored.nonzero().squeeze(1)
        filled = rounded_up(rows, scored)
        assert torch.equal(filled[:count], rows)
        assert not scored[filled[count:]].any()
        sizes.add(len(filled))
    assert sizes == {1024, 1152}
    batch = small_text.TASK.train_batch(8, 0, 0)
    targets = batch.targets.view(-1)
    targets[(targets != IGNORED).nonzero().squeeze(1)[:7]] = IGNORED
    rows = (targets != IGNORED).nonzero().squeeze(1)
    filled = rounded_up(rows, targets != IGNORED)
    assert len(filled) > len(rows)
    model = small_text.create_host(replace(small_text.HOST, dropout=0.0), small_text.TASK, 0).double()
    network = TextNetwork(model, small_text.TASK)
    found = []
    for chosen in (rows, filled):
        loss, hits = network(batch, chosen)
        found.append((loss, hits, *torch.autograd.grad(loss, list(model.parameters()))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
