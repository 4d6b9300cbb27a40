"""All sequence tasks by name."""

from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from linattn.lab.tasks.text.task import SequenceTask
from linattn.support.config import option_of
from linattn.support.options import OptionError, SettingError, check_option

# Name -> class and its module below linattn.lab.tasks, which is imported when its task is first used.
TASKS = {
    "text": "text.language:Text",
    "masked-text": "text.language:MaskedText",
    "mqar": "text.mqar:Mqar",
    "mqar-mix": "text.mqar:MqarMix",
    "mad-recall": "text.mad:InContextRecall",
    "mad-noisy-recall": "text.mad:NoisyRecall",
    "mad-fuzzy-recall": "text.mad:FuzzyRecall",
    "mad-selective-copying": "text.mad:SelectiveCopying",
    "mad-compression": "text.mad:Compression",
    "mad-memorization": "text.mad:Memorization",
    "regbench": "text.regbench:RegBench",
    "listops": "text.listops:ListOps",
    "lra-text": "text.lra:LraText",
    "lra-image": "text.lra:LraImage",
    "pathfinder": "text.pathfinder:Pathfinder",
    "passkey": "text.passkey:Passkey",
    "glue": "text.glue:Glue",
    "stsb": "text.glue:Similarity",
    "depo": "synthetic.depo:Depo",
    "brevo": "synthetic.brevo:Brevo",
    "capo": "synthetic.capo:Capo",
    "mano": "synthetic.mano:Mano",
    "lano": "synthetic.lano:Lano",
}


def text_tasks() -> list[str]:
    """Names of all tasks, for ``text_task``.

    Example:
        >>> "mqar" in text_tasks()
        True
    """
    return list(TASKS)


def task_class(name: str) -> type[SequenceTask]:
    check_option("task", name, TASKS)
    module, _, cls = TASKS[name].partition(":")
    found: type[SequenceTask] = getattr(import_module(f"linattn.lab.tasks.{module}"), cls)
    return found


def text_task(name: str, **settings: Any) -> SequenceTask:
    """Create a task with its default settings, changed by ``settings``; lists pass for tuples, texts are parsed.

    Example:
        >>> task = text_task("mqar", vocab=64, length=32, pairs=4)
        >>> task.kind, task.vocabulary, task.length, task.test_examples
        ('causal', 64, 32, 3000)
        >>> batch = next(task.train_batches(8, seed=0))
        >>> batch.inputs.shape
        torch.Size([8, 32])
    """
    cls = task_class(name)
    for field in fields(cls):
        if field.default is MISSING and field.name not in settings:
            raise SettingError(field.name, f"{name} needs {option_of(field).help}")
    try:
        return cls.parse(settings)
    except OptionError as error:
        raise SettingError(error.option, error.message) from error


def usual_settings(name: str) -> dict[str, Any]:
    """The settings of a task that have a default, with their defaults."""
    return {field.name: field.default for field in fields(task_class(name)) if field.default is not MISSING}
