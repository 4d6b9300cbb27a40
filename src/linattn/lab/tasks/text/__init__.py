"""Sequence tasks: drawn at random by rules, or read from text, jsonl and npz files."""

from linattn.lab.tasks.text.registry import STANDARDS, Standard, text_task
from linattn.lab.tasks.text.task import IGNORED, Sequences, SequenceTask

__all__ = ["IGNORED", "STANDARDS", "SequenceTask", "Sequences", "Standard", "text_task"]
