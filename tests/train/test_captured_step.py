"""Recorded steps without a GPU: a recorder that keeps the function stands in for CUDA's, and some that get it wrong."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import typer
from tests.train.small_run import CONFIG, STEPS, SmallBatches, log_without_seconds, run
from tests.train.text import small_text
from torch import nn
from typer.testing import CliRunner

from linattn.support.options import OptionError
from linattn.tasks.text import IGNORED
from linattn.train import captured_step, rounds
from linattn.train.captured_step import MOST_GRAPHS, CapturedStep, Graph, graphs_wanted
from linattn.train.config import TrainConfig
from linattn.train.recorder import Recorder, RecordError
from linattn.train.run import Run
from linattn.train.step_check import Snapshot, difference, disagreement, training_state
from linattn.train.text.config import TextConfig
from linattn.train.text.feed import rounded_up
from linattn.train.text.network import TextNetwork

SHORT = replace(CONFIG, epochs=1)
EPOCHS, LAST = CONFIG.epochs, (CONFIG.epochs - 1, STEPS - 2)


class Keeps:
    """A graph is the function itself."""

    def __init__(self, device):
        self.recorded, self.replays = 0, 0

    def warm_up(self, run):
        run()

    def forget(self):
        pass

    tidy = forget

    def record(self, run):
        self.recorded += 1

        def replay():
            self.replays += 1
            run()

        return replay


class Refuses(Keeps):
    def record(self, run):
        raise RecordError("AcceleratorError: operation not permitted when stream is capturing")


def recorded_with(recorder, patch):
    """All runs from here on record their steps; a list of the recorders that were made."""
    made = []
    patch.setattr(rounds, "graphs_wanted", lambda config, accelerator: config.graphs is not False)
    patch.setattr(captured_step, "Recorder", lambda device: made.append(recorder(device)) or made[-1])
    return made


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
    model, _ = small_text.run(tmp_path / "recorded", config)
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


def wrong_replay(kind, trained):
    """A recorder whose replays are wrong in one way; ``trained`` gets the run."""

    class Wrong(Keeps):
        def record(self, run):
            current = trained[-1]
            rate, first = current._rate.clone(), torch.get_rng_state()
            small = current.model.blocks[1][0].bias

            def replay():
                if kind == "nothing":
                    return
                if kind == "frozen rate":
                    current._rate.copy_(rate)
                elif kind == "frozen draws":
                    torch.set_rng_state(first)
                moments = current.optimizer.state[small]
                kept = [value.clone() for value in (small.detach(), moments["exp_avg"], moments["exp_avg_sq"])]
                run()
                if kind == "one parameter left out":
                    for value, old in zip((small.detach(), *list(moments.values())[1:]), kept, strict=True):
                        value.copy_(old)
                elif kind == "no sums":
                    current.meter.sums.zero_()

            return replay

    return Wrong


@pytest.mark.parametrize(
    "kind", ["nothing", "frozen rate", "frozen draws", "frozen batch", "one parameter left out", "no sums"]
)
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


def test_a_recording_that_breaks_off_leaves_the_device_as_it_was(monkeypatch):
    """torch's own way out of it stops half-way: stream, memory and generator are put right in this order."""
    said, stream = [], SimpleNamespace(wait_stream=lambda other: said.append("wait"))

    class BreaksOff:
        def __init__(self, graph, **options):
            said.append(options)

        def __enter__(self):
            pass

        def __exit__(self, *error):
            if error[0] is not None:
                raise RuntimeError("capture invalidated")

    def end(*given):
        said.append(("memory", *given))
        raise RuntimeError("not recording")

    generator = SimpleNamespace(clone_state=lambda: "spare", graphsafe_set_state=lambda state: said.append(state))
    stand_ins = {
        "Stream": lambda device: stream, "graph_pool_handle": lambda: (0, 1), "current_stream": lambda device: stream,
        "stream": nullcontext, "current_device": lambda: 0, "default_generators": [generator], "graph": BreaksOff,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: said.append("replay")),
        "set_stream": lambda given: said.append(given is stream), "synchronize": lambda device: said.append("sync"),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    options = {"pool": (0, 1), "stream": stream, "capture_error_mode": "thread_local"}
    recorder = Recorder(torch.device("cuda"))
    recorder.warm_up(lambda: said.append("run"))
    recorder.record(lambda: said.append("run"))()
    assert said == ["wait", "run", "wait", options, "run", "replay"]
    said.clear()
    with pytest.raises(RecordError, match=r"ZeroDivisionError: .*by zero"):
        recorder.record(lambda: 1 // 0)
    assert said == [options, True, ("memory", 0, (0, 1)), "spare", "sync"]


def counting():
    """A step that adds its input to a sum, recorded by one that keeps it."""
    total = torch.zeros(3)

    def step(given, *_):
        total.add_(given.sum())

    recorder = Keeps(None)
    return CapturedStep(step, lambda: {"sums.loss and hits": total}, "fp32", total.device, recorder), recorder, total


def test_each_shape_has_a_graph_and_there_is_an_end_of_them():
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


def test_a_graph_that_leaves_no_memory_for_a_step_beside_it_is_given_up():
    total, calls = torch.zeros(3), []

    def step(given):
        calls.append(1)
        total.add_(given.sum())
        if len(calls) == 4:  # after two trials and a first step beside the graph
            raise torch.OutOfMemoryError("CUDA out of memory")

    captured = CapturedStep(step, lambda: {"sums.loss and hits": total}, "fp32", total.device, Keeps(None))
    with pytest.warns(RuntimeWarning, match="do not fit into memory"):
        captured(torch.ones(2))
    captured(torch.ones(2))
    assert total.tolist() == [4.0] * 3, "each step once"


def test_differences_are_shares_of_what_a_step_changes():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sums = torch.zeros(3, dtype=torch.float64)

    def state():
        return training_state(model, optimizer, (), sums)

    before = Snapshot(state())
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    sums.add_(torch.tensor([3.0, 4.0, 0.0]))
    first = Snapshot(state())
    assert set(difference(before, first, state()).values()) == {0.0}
    sums[0] += 0.5
    optimizer.state[model.bias]["exp_avg"].mul_(1.01)
    found = difference(before, first, state())
    assert found["sums"] == pytest.approx(0.1)
    assert found["moments, exp_avg"] == pytest.approx(0.01, rel=0.1), "of its own size, not of all of them"
    assert found["weights"] == 0
    assert "sums differ by 1.0e-01" in disagreement(found, {}, "bf16")
    assert disagreement(found, {"sums": 0.1}, "bf16") is None, "no farther apart than the step is from itself"
    assert "moments" in disagreement(found | {"sums": 0.0}, {}, "fp32")
    assert "nan" in disagreement({"sums": float("nan")}, {}, "bf16")
    before.restore(state())
    assert sums.tolist() == [0, 0, 0]
    assert model.weight.grad is None
    assert optimizer.state[model.bias]["exp_avg"].item() == 0, "it was not there before"
    assert torch.equal(model.weight, before.values["weights.weight"])


@pytest.mark.parametrize(
    ("processes", "accumulation", "reason"), [(2, 1, "2 processes"), (1, 4, "in 4 parts"), (1, 1, None)]
)
def test_what_speaks_against_graphs_is_told(processes, accumulation, reason, recwarn):
    gpu = SimpleNamespace(device=torch.device("cuda"), num_processes=processes)
    for graphs in (None, True):
        config = SimpleNamespace(graphs=graphs, accumulation=accumulation)
        assert graphs_wanted(config, gpu) == (reason is None)
    assert all(reason in str(w.message) for w in recwarn)
    assert bool(len(recwarn)) == (reason is not None)
    recwarn.clear()
    assert not graphs_wanted(SimpleNamespace(graphs=False, accumulation=accumulation), gpu)
    cpu = SimpleNamespace(device=torch.device("cpu"), num_processes=processes)
    assert not graphs_wanted(SimpleNamespace(graphs=None, accumulation=accumulation), cpu)
    assert len(recwarn) == 0, "what was not asked for needs no reason"


@pytest.mark.parametrize("config", [TrainConfig(), TextConfig()])
def test_graphs_are_an_option_of_gpus(config):
    replace(config, graphs=False).check()
    with pytest.raises(OptionError, match=r"graphs: CUDA graphs need a GPU, and device is cpu"):
        replace(config, graphs=True).check()
    with pytest.raises(OptionError, match=r"graphs: must be True, False or None, got 1"):
        replace(config, graphs=1).check()


@pytest.mark.parametrize(("command", "arguments"), [("train", []), ("train", ["task", "mqar"]), ("compare", [])])
def test_the_command_line_has_it(command, arguments, tmp_path):
    from linattn.cli import compare, train

    app = typer.Typer()
    app.add_typer({"train": train, "compare": compare}[command].app, name=command)
    given = [command, *arguments, "--graphs", "--device", "cpu", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 2, result.output
    assert "--graphs" in result.output
    assert "need a GPU" in result.output


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
