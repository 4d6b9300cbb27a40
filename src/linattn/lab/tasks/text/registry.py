"""All sequence tasks by name."""

from dataclasses import fields
from importlib import import_module
from typing import Any

from linattn.lab.tasks.text.setting_kinds import check_kinds
from linattn.lab.tasks.text.task import SequenceTask
from linattn.support.options import SettingError, check_option

# Name -> class and its module: below this folder or, if the name has a dot, below linattn.lab.tasks.
# A module is imported when its task is first used.
TASKS = {
    "text": ("language", "Text"),
    "masked-text": ("language", "MaskedText"),
    "mqar": ("mqar", "Mqar"),
    "mqar-mix": ("mqar_mix", "MqarMix"),
    "mad-recall": ("mad_recall", "InContextRecall"),
    "mad-noisy-recall": ("mad_recall", "NoisyRecall"),
    "mad-fuzzy-recall": ("mad_fuzzy", "FuzzyRecall"),
    "mad-selective-copying": ("mad_state", "SelectiveCopying"),
    "mad-compression": ("mad_state", "Compression"),
    "mad-memorization": ("mad_state", "Memorization"),
    "regbench": ("regbench", "RegBench"),
    "listops": ("listops", "ListOps"),
    "lra-text": ("lra_text", "LraText"),
    "lra-image": ("lra_image", "LraImage"),
    "pathfinder": ("pathfinder", "Pathfinder"),
    "passkey": ("passkey", "Passkey"),
    "glue": ("glue", "Glue"),
    "stsb": ("similarity", "Similarity"),
    "depo": ("synthetic.depo", "Depo"),
    "brevo": ("synthetic.brevo", "Brevo"),
    "capo": ("synthetic.capo", "Capo"),
    "mano": ("synthetic.mano", "Mano"),
    "lano": ("synthetic.lano", "Lano"),
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
    module, cls = TASKS[name]
    place = f"linattn.lab.tasks.{module}" if "." in module else f"linattn.lab.tasks.text.{module}"
    found: type[SequenceTask] = getattr(import_module(place), cls)
    return found


def text_task(name: str, **settings: Any) -> SequenceTask:
    """Create a task with its default settings, changed by ``settings``.

    Example:
        >>> task = text_task("mqar", vocab=64, length=32, pairs=4)
        >>> task.kind, task.vocabulary, task.length, task.test_examples
        ('causal', 64, 32, 3000)
        >>> batch = next(task.train_batches(8, seed=0))
        >>> batch.inputs.shape
        torch.Size([8, 32])
    """
    cls = task_class(name)
    known = sorted(field.name for field in fields(cls) if field.init)  # type: ignore[arg-type]
    for setting in settings:
        if setting not in known:
            raise SettingError(setting, f"{name} has no such setting; it has {', '.join(known)}")
    for setting, what in cls.needs.items():
        if setting not in settings:
            raise SettingError(setting, f"{name} needs {what}")
    check_kinds(cls, settings)
    return cls(**settings)
