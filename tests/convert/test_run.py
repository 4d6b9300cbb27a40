"""One call: conversion, both stages, figures after each, and the same again after a kill; the papers' numbers."""

import json
from dataclasses import replace

import pytest
import torch
from tests.convert.tiny import Letters, llama, same

import linattn
from linattn.convert.convert import linearized_layers
from linattn.convert.finetune import FinetuneOptions
from linattn.convert.run import paper_stages, with_recipe
from linattn.convert.training import data
from linattn.convert.training.loop import average_gradients, shared
from linattn.convert.transfer import TransferOptions
from linattn.support.options import OptionError

FIRST = TransferOptions(steps=6, batch_size=2, lr=0.03, checkpoint_steps=2, recall_share=0.5)
SECOND = FinetuneOptions(steps=6, batch_size=2, lr=3e-3, checkpoint_steps=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = torch.Generator().manual_seed(0)
    path.write_text("".join(chr(97 + i) for i in torch.randint(26, (3000,), generator=draw).tolist()))
    return path


def run(text, **options):
    options = {"transfer": FIRST, "finetune": SECOND, "window": 8, **options}
    return linattn.linearize(llama(), "lolcats", text=text, tokenizer=Letters(), **options)


def test_figures_of_every_stage_and_a_run_that_was_stopped(text, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "HELD_OUT_TOKENS", 128)  # two windows of the four that are held out
    stages = []
    whole = run(text, on_stage=lambda name, model: stages.append(name))
    report = whole.linearize_report
    assert stages == [figures.name for figures in report.stages] == ["teacher", "converted", "transfer", "finetune"]
    assert report.metric == "perplexity"
    assert len(report.losses) == 6
    for curve in report.curves:
        assert curve.after < curve.before
    from linattn.convert.evaluate.measures import losses_of_windows, perplexity_of
    from linattn.convert.training.data import read_text

    held_out = read_text(text, Letters()).held_out
    qualities = [figures.quality for figures in report.stages]
    windows = losses_of_windows(llama(), [held_out[:64], held_out[192:256]], 64)
    assert qualities[0] == pytest.approx(perplexity_of(windows)["perplexity"], rel=1e-5)
    assert qualities[1] != qualities[0]

    def stop(name, model):
        if name == "transfer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(text, folder=tmp_path, on_stage=stop)
    known = json.loads((tmp_path / "linearize_report.json").read_text())
    assert [figures["name"] for figures in known["stages"]] == ["teacher", "converted", "transfer"]
    resumed = run(text, folder=tmp_path)
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert [figures.quality for figures in resumed.linearize_report.stages] == qualities


def test_conversion_alone_and_what_makes_no_sense(text):
    model = linattn.linearize(llama(), "still", layers=[1], window=8)
    assert list(model.linearize_report.plan["layers"]) == ["1"]
    assert model.linearize_report.curves == []
    with pytest.raises(OptionError, match="tokenizer: is needed to read text"):
        linattn.linearize(llama(), text=text)
    with pytest.raises(OptionError, match="tokens of the training part"):
        run(text, transfer=TransferOptions(length=5000))


def test_tokens_are_counted_in_steps(text):
    report = run(text, transfer=TransferOptions(tokens=300, batch_size=2), finetune=None).linearize_report
    assert len(report.curves[0].losses) == 3  # of 2 x 64 tokens
    assert [figures.tokens for figures in report.stages] == [0, 0, 384]
    options = {"method": "features", "mechanism": "elu", "transfer": FIRST, "finetune": None}
    nothing = linattn.linearize(llama(), text=text, tokenizer=Letters(), **options).linearize_report
    assert [figures.tokens for figures in nothing.stages] == [0, 0, 0]  # it has nothing to learn


def test_a_length_of_the_second_stage_is_not_that_of_the_first(text):
    short = replace(SECOND, length=24)
    model = linattn.linearize(
        llama(), "still", text=text, tokenizer=Letters(), transfer=FIRST, finetune=short, window=8
    )
    tokens = {figures.name: figures.tokens for figures in model.linearize_report.stages}
    assert tokens["transfer"] == FIRST.steps * FIRST.batch_size * 64  # what the model was made for
    assert tokens["finetune"] == SECOND.steps * SECOND.batch_size * 24


def test_degrees_of_freedom_split_the_cost(text):
    options = {"method": "dof", "window": 0, "units": "one", "cost": 32}
    model = linattn.linearize(llama(), text=text, tokenizer=Letters(), transfer=FIRST, finetune=None, **options)
    report = model.linearize_report
    dims = [layer["feature_dim"] for layer in report.plan["layers"].values()]
    assert sum(dims) == 2 * 32
    assert len(report.degrees["layers"]) == 2
    assert all(curve.after < 1.5 * curve.before for curve in report.curves)
    alone = {"text": text, "tokenizer": Letters(), "transfer": None, "finetune": None}
    clipped = linattn.linearize(llama(), **alone, **options, clip=24, tolerance=2**-8).linearize_report
    assert clipped.degrees["tolerance"] == 2**-8
    wider = linattn.linearize(llama(), **alone, **options, tolerance=2**-8).linearize_report.plan["layers"]
    kept = {number: min(layer["feature_dim"], 24) for number, layer in wider.items()}
    assert {number: layer["feature_dim"] for number, layer in clipped.plan["layers"].items()} == kept
    assert sum(kept.values()) < 2 * 32
    for few, count in (({"cost": 24}, 24), ({"cost": 24, "clip": 16}, 16), ({"clip": 99}, 8)):
        alone = linattn.linearize(llama(), "dof", **few).linearize_report.plan["layers"]  # nothing is measured
        assert {layer.get("feature_dim", 8) for layer in alone.values()} == {count}
    del options["cost"]
    fixed = linattn.linearize(llama(), text=text, tokenizer=Letters(), transfer=None, finetune=None, feature_dim=32,
                              **options)  # fmt: skip
    assert [layer["feature_dim"] for layer in fixed.linearize_report.plan["layers"].values()] == [32, 32]
    units = [layer.core.features.log_unit for layer in linearized_layers(fixed).values()]
    assert all((unit != 0).all() for unit in units)  # the same start as with dimensions of their own


def test_processes_share_a_batch_and_average_their_gradients():
    class Two:
        """The second of two processes; the first has twice its gradients."""

        num_processes, process_index = 2, 1

        def reduce(self, tensor, how):
            assert how == "mean"
            return (tensor + 2 * tensor) / 2

    batch = {"input_ids": torch.arange(8).view(4, 2)}
    assert shared(batch, torch.device("cpu"), Two())["input_ids"].tolist() == [[2, 3], [6, 7]]
    with pytest.raises(OptionError, match="batch_size: must be a multiple of the 2 processes, got 3"):
        shared({"input_ids": torch.zeros(3, 1)}, torch.device("cpu"), Two())
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (3,), (1,))]
    for number, parameter in enumerate(parameters[:2]):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    average_gradients(parameters, Two())
    assert [parameter.grad.unique().item() for parameter in parameters[:2]] == [1.5, 3.0]
    assert parameters[2].grad is None


BOTH = {"batch_size": 8, "clip_norm": 1.0, "tokens": 20_000_000}


@pytest.mark.parametrize(("method", "alpha"), [("lolcats", 16.0), ("still", 8.0), ("dof", None)])
def test_stages_are_those_of_the_papers(method, alpha):
    stages = paper_stages(method)
    if method == "dof":
        assert stages["transfer"] == TransferOptions(loss="cross_entropy", lr=0.02, scale_factor=10.0, batch_size=128)
        assert stages["finetune"] == FinetuneOptions()
        return
    assert stages["transfer"] == TransferOptions(loss="mse", lr=0.01, scale_factor=1.0, **BOTH)
    assert stages["finetune"] == FinetuneOptions(objective="next_token", lr=1e-4, rank=8, alpha=alpha, **BOTH)


def test_what_is_given_counts_more_and_steps_replace_tokens():
    first, second = with_recipe("paper", "still", {"steps": 5, "lr": 0.5}, {"tokens": 7})
    assert (first["lr"], first["steps"], first["batch_size"], "tokens" in first) == (0.5, 5, 8, False)
    assert (second["tokens"], second["lr"]) == (7, 1e-4)
    assert with_recipe("", "t2r", {"lr": 0.5}, {}) == ({"lr": 0.5}, {})
    for recipe, method, message in (("book", "still", "must be one of paper"), ("paper", "t2r", "got method 't2r'")):
        with pytest.raises(OptionError, match=f"recipe: .*{message}"):
            with_recipe(recipe, method, {}, {})
