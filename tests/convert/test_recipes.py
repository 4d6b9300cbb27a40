"""Both stages as the papers have them, number by number."""

import pytest

from linattn.convert.finetune import FinetuneOptions
from linattn.convert.recipes import STAGES, paper_stages, with_recipe
from linattn.convert.transfer import TransferOptions
from linattn.support.options import OptionError


@pytest.mark.parametrize(("method", "alpha"), [("lolcats", 16.0), ("still", 8.0)])
def test_lolcats_and_what_was_built_on_its_code(method, alpha):
    stages = paper_stages(method)
    both = {"batch_size": 8, "clip_norm": 1.0, "tokens": 20_000_000}
    assert stages["transfer"] == TransferOptions(loss="mse", lr=0.01, scale_factor=1.0, **both)
    assert stages["finetune"] == FinetuneOptions(objective="next_token", lr=1e-4, rank=8, alpha=alpha, **both)


def test_random_features_learn_rows():
    stages = paper_stages("dof")
    assert stages["transfer"] == TransferOptions(loss="cross_entropy", lr=0.02, scale_factor=10.0, batch_size=128)
    assert stages["finetune"] == FinetuneOptions()


@pytest.mark.parametrize("method", STAGES)
def test_every_recipe_makes_sense_as_options(method):
    for stage in paper_stages(method).values():
        stage.check()


def test_what_is_given_counts_more_and_steps_replace_tokens():
    first, second = with_recipe("paper", "still", {"steps": 5, "lr": 0.5}, {"tokens": 7})
    assert (first["lr"], first["steps"], first["batch_size"]) == (0.5, 5, 8)
    assert "tokens" not in first
    assert (second["tokens"], second["lr"]) == (7, 1e-4)
    given = ({"lr": 0.5}, {})
    assert with_recipe("", "t2r", *given) == given


@pytest.mark.parametrize(
    ("recipe", "method", "message"),
    [
        ("book", "still", "recipe: must be one of paper"),
        ("paper", "t2r", "exists for the methods .*, got method 't2r'"),
    ],
)
def test_what_has_no_recipe_is_named(recipe, method, message):
    with pytest.raises(OptionError, match=message):
        with_recipe(recipe, method, {}, {})
