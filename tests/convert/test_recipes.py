"""Both stages as the papers have them, number by number."""

import pytest

from linattn.convert.finetune import FinetuneOptions
from linattn.convert.run import paper_stages, with_recipe
from linattn.convert.transfer import TransferOptions
from linattn.support.options import OptionError

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
