import pytest

from linattn.support import files
from linattn.support.files import write_atomically


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("halfway", [True, False])
def test_a_crash_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error, halfway):
    path = tmp_path / "a.json"
    write_atomically(path, lambda temporary: temporary.write_text("old"))

    def fail(*_):
        raise error

    def write(temporary):
        temporary.write_text("ne")
        if halfway:
            fail()

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(error):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["a.json"]


def test_folders_are_made_and_others_may_read(tmp_path):
    path = tmp_path / "deep" / "er" / "a.json"
    write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o044 == 0o044
