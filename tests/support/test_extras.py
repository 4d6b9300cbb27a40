import pytest

from linattn.support import extras
from linattn.support.extras import EXTRAS, MissingExtraError, need


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "timm" else object())
    with pytest.raises(MissingExtraError, match=r"RandAugment needs timm: pip install 'linattn\[vision\]'"):
        need("RandAugment", "accelerate", "timm")
    need("training", "accelerate")


def test_every_extra_is_in_the_project_file(pytestconfig):
    text = (pytestconfig.rootpath / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in text for extra in EXTRAS.values())
