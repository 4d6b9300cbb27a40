"""Sequence tasks: drawn at random by rules, or read from text, jsonl and npz files."""

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.registry import text_task, text_tasks
from linattn.lab.tasks.text.settings import Standard, standard
from linattn.lab.tasks.text.task import SequenceTask

__all__ = ["IGNORED", "SequenceTask", "Sequences", "Standard", "standard", "text_task", "text_tasks"]
