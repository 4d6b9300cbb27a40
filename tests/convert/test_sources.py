"""Files that an option names: what is wrong in them is told under its name."""

import pytest

from linattn.lab.convert.jobs.sources import documents, labelled
from linattn.support.options import OptionError


@pytest.mark.parametrize("line", ['{"label": 0}', "words"])
def test_bad_lines_are_those_of_the_option(line, tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(line)
    with pytest.raises(OptionError) as error:
        labelled(tmp_path)
    assert error.value.option == "probe"
    with pytest.raises(OptionError) as error:
        documents("text", str(tmp_path / "train.jsonl"))
    assert error.value.option == "text"
