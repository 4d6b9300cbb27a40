"""Stage 1: every layer learns, one at a time, and a run that was stopped ends where it would have ended."""

import weakref

import pytest
import torch
from tests.convert.tiny import LENGTH, Counted, held_out, llama, same

from linattn.convert.convert import Observation, linearized_layers, observing, set_mode
from linattn.convert.training.loop import UnstableError
from linattn.convert.transfer import TransferOptions, relative_error, row_divergence, transfer, transfer_errors
from linattn.support.checkpoint import ResumeError

OPTIONS = TransferOptions(steps=6, checkpoint_steps=2)


def cores(model):
    return {name: value.clone() for name, value in model.state_dict().items() if ".core." in name}


@pytest.mark.parametrize(
    ("method", "options", "loss", "dtype"),
    [
        ("still", {"linear_weight": 2.0}, "mse", torch.float32),
        ("lolcats", {}, "mse", torch.bfloat16),
        ("hedgehog", {"window": 0}, "cross_entropy", torch.float32),
        ("features", {"mechanism": "mirror"}, "mse", torch.float32),
    ],
)
def test_errors_fall_in_every_layer_and_nothing_else_changes(method, options, loss, dtype):
    model = llama(method, dtype, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    curves = transfer(
        model, Counted(4), TransferOptions(steps=40, lr=0.05, loss=loss, scale_factor=2), held_out=held_out()
    )
    assert [curve.layer for curve in curves] == [0, 1]
    for curve in curves:
        assert curve.after < 0.97 * curve.before, curve
        assert len(curve.losses) == 40
    assert transfer_errors(model, held_out()) == {curve.layer: curve.after for curve in curves}
    for name, value in model.state_dict().items():
        learned = ".core." in name
        assert learned or torch.equal(value, before[name]), name
        assert value.dtype == (torch.float32 if learned else dtype)
    assert all(layer.mode == "student" and layer.observe is None for layer in linearized_layers(model).values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_graph_outlives_its_layer(monkeypatch):
    """When a layer's student starts, nothing that autograd kept for an earlier one is left."""
    model = llama("still", num_hidden_layers=3)
    alive, at_start, most = weakref.WeakSet(), [], []

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        kept = Kept(tensor)
        alive.add(kept)
        most.append(len(alive))
        return kept

    for layer in linearized_layers(model).values():
        monkeypatch.setattr(layer.core, "attend", watched(layer.core.attend, lambda: at_start.append(len(alive))))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        transfer(model, Counted(), TransferOptions(steps=2))
    assert len(at_start) == 6
    assert max(most) > 5
    assert set(at_start) == {0}


def watched(function, before):
    def run(*args, **kwargs):
        before()
        return function(*args, **kwargs)

    return run


def test_a_run_that_was_stopped_ends_in_the_same_weights(tmp_path):
    whole = llama("still")
    curves = transfer(whole, Counted(), OPTIONS, held_out=held_out())
    stopped = llama("still")
    with pytest.raises(KeyboardInterrupt):
        transfer(stopped, Counted(stop=5), OPTIONS, tmp_path, held_out=held_out())
    resumed, batches = llama("still"), Counted()
    assert transfer(resumed, batches, OPTIONS, tmp_path, held_out=held_out()) == curves
    assert batches.asked == [4, 5]
    assert same(cores(resumed), cores(whole))
    # A finished one is read, not trained.
    again, batches = llama("still"), Counted()
    assert transfer(again, batches, OPTIONS, tmp_path, held_out=held_out()) == curves
    assert batches.asked == []
    assert same(cores(again), cores(whole))


def test_another_run_in_the_folder_is_refused(tmp_path):
    transfer(llama("still"), Counted(), TransferOptions(steps=1), tmp_path)
    with pytest.raises(ResumeError, match=r"another lr \(was 0.01, is 0.1\)"):
        transfer(llama("still"), Counted(), TransferOptions(steps=1, lr=0.1), tmp_path)
    with pytest.raises(ResumeError, match="another cores"):
        transfer(llama("lolcats"), Counted(), TransferOptions(steps=1), tmp_path)


def test_a_loss_that_is_no_number_is_named_with_its_layer():
    model = llama("still")
    with torch.no_grad():
        linearized_layers(model)[1].core.features.key_map.weight.fill_(float("nan"))
    with pytest.raises(UnstableError, match=r"loss of 1 is not finite at step 0"):
        transfer(model, Counted(), TransferOptions(steps=2))


def test_divergence_of_rows_is_that_of_the_written_out_weights():
    model = llama("hedgehog", torch.float64, window=0)
    layer = linearized_layers(model)[0]
    layer.core.double()
    seen = observed(model, Counted()(0)["input_ids"])
    phi, psi = layer.core.feature_pair(seen.q, seen.k)
    weights = (phi @ psi.repeat_interleave(2, 1).mT).tril()
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    logits = seen.q @ seen.k.repeat_interleave(2, 1).mT / 8**0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    softmax = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.where(hidden, 0, softmax * (softmax.clamp_min(1e-300) / weights).log()).sum(-1).mean()
    found = row_divergence(layer.core, seen, causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_padding_counts_neither_as_error_nor_as_size():
    model = llama("still")
    core = linearized_layers(model)[0].core
    seen = observed(model, Counted()(0)["input_ids"])
    cut = LENGTH - 9
    mask = torch.arange(LENGTH) < cut
    broken = [x.masked_fill(~mask[:, None], torch.nan) for x in (seen.q, seen.k, seen.v, seen.output)]
    padded = Observation(0, *broken[:3], seen.x, mask.expand(2, -1), broken[3])
    short = Observation(0, *(x[:, :, :cut] for x in seen[1:4]), seen.x[:, :cut], None, seen.output[:, :, :cut])
    errors = [relative_error(core, each) for each in (padded, short)]
    torch.testing.assert_close(*errors)
    gradients = [torch.autograd.grad(error, list(core.parameters())) for error in errors]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)


def observed(model, ids):
    found = []
    with observing(model, found.append), torch.no_grad():
        model(ids)
    set_mode(model, "student")
    return found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_core_that_is_exact_already_does_not_follow_rounding_away(dtype):
    model = llama("zeros_softmax", dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    transfer(model, Counted(), TransferOptions(steps=6))
    after = model.state_dict()
    assert all(torch.equal(after[name].to(value.dtype), value) for name, value in before.items())
