"""Digests of data: they change with what is read, and with nothing else."""

from pathlib import Path

from linattn.lab.tasks.text import text_task
from linattn.lab.tasks.text.task import content_digest


def test_a_file_is_known_by_what_it_holds_wherever_it_lies(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("some text")
    two.write_text("some text")
    assert content_digest([one]) == content_digest([two])
    two.write_text("text some")  # as long as before
    assert content_digest([one]) != content_digest([two])
    assert content_digest([one, two]) != content_digest([two, one])


def test_a_folder_is_known_by_its_files_of_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    before = content_digest([tmp_path])
    (tmp_path / "model.safetensors").write_text("weights beside a tokenizer")
    (tmp_path / "no.txt").mkdir()
    assert content_digest([tmp_path]) == before
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")  # texts are read in the order of their names
    assert content_digest([tmp_path]) != before


def test_what_is_drawn_has_no_files(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text " * 20)
    assert text_task("mqar").content is None
    assert text_task("text", data=str(path), length=8).content == content_digest([path])
