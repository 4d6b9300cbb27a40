"""The folder of a comparison on sequences: what may go on in it, and what may not."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from rich.console import Console
from tests.lab.compare.test_compare_text import CONFIG

from linattn.lab.compare import compare as main
from linattn.lab.compare.compare import compare
from linattn.support.options import OptionError


def test_a_place_for_what_is_drawn_may_be_named_later():
    kept = replace(CONFIG, settings=CONFIG.settings | {"cache": "somewhere"})
    assert kept.fingerprint() == CONFIG.fingerprint()


def test_a_folder_of_an_earlier_version_goes_on(tmp_path):
    """What it does not know is as it was then: how the rate falls, eps, heads by their width, tied embeddings."""
    config = replace(CONFIG, output=tmp_path)
    known = {n: v for n, v in config.fingerprint().items() if n not in ("schedule", "eps", "head_dim", "tied")}
    (tmp_path / "settings.json").write_text(json.dumps(known))
    main.same_settings(config)
    linear = replace(config, train=replace(config.train, schedule="linear"))
    with pytest.raises(OptionError, match="schedule was cosine, now linear"):
        main.same_settings(linear)
    begun = tmp_path / "linear"
    begun.mkdir()
    main.same_settings(replace(linear, output=begun))
    with pytest.raises(OptionError, match="schedule was linear, now cosine"):
        main.same_settings(replace(config, output=begun))
    # a recipe's fixed set that is switched off is what was there before; where the task itself has one it is not
    for task, known in (("mqar", {}), ("regbench", {"train_examples": "None"})):
        endless = TextCompareConfig(task, {"train_examples": None}, host=config.host)
        assert endless.fingerprint()["settings"] == known
    texts, train = Texts(config), {"steps": 2}
    meta = {"train": train | {"schedule": "cosine", "eps": 1e-8}, "device": "cpu"}
    names = ["softmax 16"]
    assert main.cost_key(tmp_path, meta, texts, names) == main.cost_key(tmp_path, meta | {"train": train}, texts, names)


def test_other_data_under_the_same_name_are_noticed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one text and no other. " * 40)
    config = replace(
        CONFIG, task="text", settings={"data": str(text), "length": 16}, patterns=("elu",), canons=(None,),
        widths=(16,), lrs=(), output=tmp_path / "c",
    )  # fmt: skip
    assert compare(config, Console(file=StringIO())) == 0
    text.write_text("no other and one text. " * 40)
    with pytest.raises(OptionError, match=r"output: .* a comparison on other data: the files have changed since"):
        compare(config, Console(file=StringIO()))
    path = config.output / "settings.json"  # an earlier version did not write down what they held
    stored = json.loads(path.read_text())
    text.write_text("one text and no other. " * 40)
    assert stored.pop("content")
    path.write_text(json.dumps(stored))
    assert compare(config, Console(file=StringIO())) == 0


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "c").write_text("")
    for place in (tmp_path / "c", tmp_path / "c" / "inside"):
        with pytest.raises(OptionError, match="output: must be a folder that can be written to"):
            compare(replace(CONFIG, output=place), Console(file=StringIO()))
