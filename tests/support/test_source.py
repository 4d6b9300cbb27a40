from linattn.support.source import PACKAGE, source_digest


def test_the_digest_is_of_what_the_code_says_and_where(tmp_path):
    (tmp_path / "part").mkdir()
    one, two = tmp_path / "one.py", tmp_path / "part" / "two.py"
    one.write_text("a = 1\n")
    two.write_text("b = 2\n")
    first = source_digest(tmp_path)
    assert source_digest(tmp_path) == first
    (tmp_path / "notes.md").write_text("no code")
    assert source_digest(tmp_path) == first
    two.write_text("b = 3\n")
    changed = source_digest(tmp_path)
    two.write_text("b = 2\n")
    two.rename(tmp_path / "two.py")
    moved = source_digest(tmp_path)
    (tmp_path / "two.py").write_text("")
    one.write_text("a = 1\nb = 2\n")
    joined = source_digest(tmp_path)
    assert len({first, changed, moved, joined}) == 4


def test_the_package_is_all_of_linattn():
    assert (PACKAGE / "_version.py").exists()
    assert PACKAGE.name == "linattn"
