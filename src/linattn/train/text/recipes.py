"""Recipes for tasks of sequences: configs with the settings of the papers they come from."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from linattn.support.options import OptionError, check_option
from linattn.tasks.text import SequenceTask, text_task
from linattn.tasks.text.registry import task_class
from linattn.tasks.text.settings import STANDARDS, Standard
from linattn.train.text.config import TextConfig

LANGUAGE = "language"
# Host by task; those that are not named have that of a language model.
SIZES_OF = {"mqar": "mqar", "listops": "lra", "lra": "lra", "pathfinder": "lra", "mad": "mad", "regbench": "mad"}


def language() -> TextConfig:
    """Next tokens of a text, as Physics of Language Models 4.1 trains on text, shortened for models of 10-100 M."""
    return TextConfig(5000, 32, lr=1e-3, min_lr=1e-4, warmup_steps=250, weight_decay=0.1, betas=(0.9, 0.98))


def published(standard: Standard) -> TextConfig:
    """The numbers of a paper; of several learning rates one from the middle. All fall by a cosine.

    Example:
        >>> config = published(STANDARDS["listops"])
        >>> config.steps, config.batch_size, config.lr, config.warmup_steps
        (5000, 32, 0.0001, 1000)
    """
    steps, batch = standard.steps, standard.batch_size
    if steps is None:
        examples = standard.settings.get("train_examples", 50_000)
        steps = (standard.epochs or 1) * examples // batch
    warmup = standard.warmup if standard.warmup >= 1 else standard.warmup * steps
    lr = standard.learning_rates[len(standard.learning_rates) // 2]
    return TextConfig(
        steps,
        batch,
        lr=lr,
        min_lr=standard.floor * lr,
        warmup_steps=round(warmup),
        weight_decay=standard.weight_decays[-1],
        betas=(0.9, 0.98) if standard.task == "masked-text" else standard.betas,
    )


def recipes() -> list[str]:
    return [LANGUAGE, *STANDARDS]


def recipe_of(task: SequenceTask) -> str:
    """The recipe of a task: that of its name and length, else that of a language model.

    Example:
        >>> from linattn.tasks.text import text_task
        >>> recipe_of(text_task("mqar", length=512, pairs=64)), recipe_of(text_task("passkey"))
        ('mqar-512', 'language')
    """
    known = [name for name, standard in STANDARDS.items() if standard.task == task.name]
    by_length = [name for name in known if STANDARDS[name].settings.get("length", task.length) == task.length]
    return next(iter([*by_length, *known]), LANGUAGE)


def check_recipe(recipe: str, task: SequenceTask) -> None:
    """Raise ``OptionError`` for a recipe of a task of another kind: its budget and host are not for this one.

    That of a language model is for all: tasks without a recipe of their own have it.
    """
    check_option("recipe", recipe, recipes())
    if recipe != LANGUAGE and _kind(recipe) != task.kind:
        fit = ", ".join(name for name in recipes() if name == LANGUAGE or _kind(name) == task.kind)
        words = f"{recipe} is for {_kind(recipe)} tasks, and {task.name} is {task.kind}; must be one of {fit}"
        raise OptionError("recipe", words)


def _kind(recipe: str) -> str:
    return task_class(STANDARDS[recipe].task).kind


def recipe_settings(recipe: str, task: str) -> dict[str, Any]:
    """Settings of the task that a recipe brings along; none where it is not given, or another task's."""
    if not recipe:
        return {}
    check_option("recipe", recipe, recipes())
    if recipe == LANGUAGE or STANDARDS[recipe].task != task:
        return {}
    return dict(STANDARDS[recipe].settings)


def create_task(name: str, settings: Mapping[str, Any], recipe: str = "") -> SequenceTask:
    """The task with the settings that are given, and else those of the recipe.

    Example:
        >>> create_task("mqar", {"pairs": 8}, "mqar-512").length
        512
    """
    return text_task(name, **(recipe_settings(recipe, name) | dict(settings)))


def size_of(task: SequenceTask) -> str:
    """The size of the host where none is named."""
    return SIZES_OF.get(task.name, SIZES_OF.get(task.name.split("-")[0], "small"))


def host_of_recipe(recipe: str) -> dict[str, int]:
    """Depth, width and heads of the model that a recipe is for, as far as its source has one number each.

    Of several widths the smallest. Nothing where no recipe is named: a task's usual host is small.

    Example:
        >>> host_of_recipe("listops-s5"), host_of_recipe("")
        ({'depth': 8, 'width': 128}, {})
    """
    if recipe in ("", LANGUAGE):
        return {}
    check_option("recipe", recipe, recipes())
    source = STANDARDS[recipe]
    found = {"depth": source.layers, "width": min(source.width, default=None), "heads": source.heads}
    return {name: value for name, value in found.items() if value is not None}


def configure(
    task: SequenceTask, changes: Mapping[str, Any], recipe: str = "", tokens: int | None = None
) -> TextConfig:
    """A recipe with ``changes``, as a command line gives them: None keeps what the recipe says.

    ``clip_norm`` of 0 switches off. ``tokens`` gives the budget in tokens, in the place of steps: as many steps as
    begin within it. A warm-up that is not given keeps its share of the steps, and the lowest rate its share of the
    highest.

    Example:
        >>> from linattn.tasks.text import text_task
        >>> config = configure(text_task("listops"), {"batch_size": 64, "lr": None}, tokens=64 * 2000 * 100)
        >>> config.steps, config.warmup_steps, config.lr
        (100, 20, 0.0001)
    """
    recipe = recipe or recipe_of(task)
    check_recipe(recipe, task)
    given = {name: value for name, value in changes.items() if value is not None}
    if "clip_norm" in given:
        given["clip_norm"] = given["clip_norm"] or None
    plain = language() if recipe == LANGUAGE else published(STANDARDS[recipe])
    if tokens is not None:
        if "steps" in given:
            raise OptionError("tokens", "gives the budget, and so does steps: leave one of them out")
        if tokens < 1:
            raise OptionError("tokens", f"must be an integer of at least 1, got {tokens}")
        given["steps"] = -(-tokens // (task.length * max(1, given.get("batch_size", plain.batch_size))))
    config = replace(plain, **given)
    if "warmup_steps" not in given:
        config = replace(config, warmup_steps=config.steps * plain.warmup_steps // plain.steps)
    if "min_lr" not in given:
        config = replace(config, min_lr=config.lr * plain.min_lr / plain.lr)
    return config
