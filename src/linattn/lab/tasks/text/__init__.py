"""Sequence tasks: drawn at random by rules, or read from text, jsonl and npz files."""

from linattn.lab.tasks.text.registry import text_task, text_tasks
from linattn.lab.tasks.text.standards import STANDARDS, Standard
from linattn.lab.tasks.text.task import IGNORED, Sequences, SequenceTask

__all__ = ["IGNORED", "STANDARDS", "SequenceTask", "Sequences", "Standard", "text_task", "text_tasks"]
