"""Recipes for sequence tasks: configs with the settings of papers."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from linattn.lab.tasks.text import SequenceTask, text_task
from linattn.lab.tasks.text.registry import task_class
from linattn.lab.tasks.text.settings import STANDARDS, Standard
from linattn.lab.train.text.config import TextConfig
from linattn.support.checks import check_integer
from linattn.support.options import OptionError, SettingError, check_option

LANGUAGE = "language"
SHAPE = ("length", "size")  # settings in which recipes of one task differ
# Default size of the host by task; other tasks have that of a language model.
SIZES_OF = {"mqar": "mqar", "listops": "lra", "lra": "lra", "pathfinder": "lra", "mad": "mad", "regbench": "mad"}


def language() -> TextConfig:
    """For text: the settings of Physics of Language Models 4.1, shortened for models of 10-100 M parameters."""
    return TextConfig(5000, 32, lr=1e-3, min_lr=1e-4, warmup_steps=250, weight_decay=0.1, betas=(0.9, 0.98))


def published(standard: Standard, examples: int | None = None, batch_size: int | None = None) -> TextConfig:
    """A config with the numbers of a paper; of several learning rates, one from the middle.

    If the paper counts epochs, the steps are those that its epochs take for ``examples`` training sequences
    (``SequenceTask.train_size``; None: as many as in the paper) in batches of ``batch_size`` (None: as in the paper).

    Example:
        >>> config = published(STANDARDS["listops"])
        >>> config.steps, config.batch_size, config.lr, config.warmup_steps, config.schedule
        (5000, 32, 0.0001, 1000, 'linear')
        >>> published(STANDARDS["mqar-mix"]).steps, published(STANDARDS["mqar-mix"], 90_000).steps
        (22500, 11250)
        >>> published(STANDARDS["mqar-mix"], batch_size=512).steps
        11250
    """
    steps, batch = standard.steps, standard.batch_size if batch_size is None else batch_size
    if steps is None:
        examples = standard.examples if examples is None else examples
        if examples is None:
            raise OptionError("examples", f"must be given: {standard.task} has as many as its files hold, got None")
        steps = max(1, (standard.epochs or 1) * examples // batch)
    warmup = standard.warmup if standard.warmup >= 1 else standard.warmup * steps
    lr = standard.learning_rates[len(standard.learning_rates) // 2]
    return TextConfig(
        steps,
        batch,
        lr=lr,
        min_lr=standard.floor * lr,
        warmup_steps=round(warmup),
        weight_decay=standard.weight_decays[-1],
        schedule=standard.lr_schedule,
        betas=standard.betas,
        eps=standard.eps,
    )


def recipes() -> list[str]:
    return [LANGUAGE, *STANDARDS]


def recipe_of(task: SequenceTask) -> str:
    """The recipe for a task: that of its name and length, else the first of its name, else that of a language model.

    Example:
        >>> from linattn.lab.tasks.text import text_task
        >>> recipe_of(text_task("mqar", length=512, pairs=64)), recipe_of(text_task("passkey"))
        ('mqar-512', 'language')
    """
    return _recipe_by_shape(task.name, {name: getattr(task, name) for name in SHAPE if hasattr(task, name)})


def _recipe_by_shape(task: str, given: Mapping[str, Any]) -> str:
    """The recipe for a task that is not created yet; settings that are not ``given`` have the task's defaults."""
    known = [name for name, standard in STANDARDS.items() if standard.task == task]
    if not known:
        return LANGUAGE
    usual = usual_settings(task)
    wanted = {name: given.get(name, usual[name]) for name in SHAPE if name in usual}
    fit = [name for name in known if wanted == {n: STANDARDS[name].settings.get(n, usual[n]) for n in wanted}]
    return next(iter([*fit, *known]))


def usual_settings(task: str) -> dict[str, Any]:
    """The settings of a task that have a default, with their defaults."""
    own: Any = task_class(task)
    return {field.name: field.default for field in fields(own) if field.init and field.default is not MISSING}


def check_recipe(recipe: str, task: SequenceTask) -> None:
    """Raise ``OptionError`` for a recipe of a different task, whose budget and host are not for this one.

    The recipe of a language model is allowed for all tasks: those without a recipe use it.
    """
    check_option("recipe", recipe, recipes())
    if recipe != LANGUAGE and _kind(recipe) != task.kind:
        fit = ", ".join(name for name in recipes() if name == LANGUAGE or _kind(name) == task.kind)
        words = f"{recipe} is for {_kind(recipe)} tasks, and {task.name} is {task.kind}; must be one of {fit}"
        raise OptionError("recipe", words)


def _kind(recipe: str) -> str:
    return task_class(STANDARDS[recipe].task).kind


def recipe_settings(recipe: str, task: str) -> dict[str, Any]:
    """The task settings that a recipe has; none if no recipe is given, or one of another task."""
    if not recipe:
        return {}
    check_option("recipe", recipe, recipes())
    if recipe == LANGUAGE or STANDARDS[recipe].task != task:
        return {}
    return dict(STANDARDS[recipe].settings)


def create_task(name: str, settings: Mapping[str, Any], recipe: str = "") -> SequenceTask:
    """Create a task with the given settings, and those of the recipe for the others.

    If no recipe is named, it is the one that :func:`configure` uses for the budget, as numbers of epochs belong to
    certain data. The length that is given decides which recipe this is.

    Example:
        >>> create_task("mqar", {"pairs": 8}, "mqar-512").length
        512
        >>> task = create_task("mqar", {"length": 512})
        >>> task.pairs, task.train_examples
        (64, 100000)
    """
    return task_with_settings(name, settings, recipe)[0]


def task_with_settings(name: str, settings: Mapping[str, Any], recipe: str = "") -> tuple[SequenceTask, dict[str, Any]]:
    """The task of :func:`create_task`, and the settings that ``text_task`` created it with."""
    given = dict(settings)
    if recipe:
        given = recipe_settings(recipe, name) | given
        return text_task(name, **given), given
    usual = usual_settings(name)
    # Defaults of the task are left out, as a comparison recognises its folder by the settings that are saved there.
    own = {n: v for n, v in recipe_settings(_recipe_by_shape(name, given), name).items() if usual.get(n) != v}
    sizes = {n: v for n, v in own.items() if n.endswith("_examples")}
    # The recipe was not named, so given settings come first. If the two are not compatible, only the sizes of sets are
    # taken from the recipe, and if these are not compatible either, nothing.
    for brought in (own, sizes):
        try:
            return text_task(name, **(brought | given)), brought | given
        except SettingError:
            continue
    return text_task(name, **given), given


def size_of(task: SequenceTask) -> str:
    """The default size of the host for a task."""
    return SIZES_OF.get(task.name, SIZES_OF.get(task.name.split("-")[0], "small"))


def host_of_recipe(recipe: str) -> dict[str, Any]:
    """Depth, width, heads and dropout of the model that a recipe is for, as fields of ``HostOptions``.

    Only what its source specifies; the smallest of several widths. Empty if no recipe is named, as the default host of
    a task is small.

    Example:
        >>> host_of_recipe("listops-s5"), host_of_recipe("")
        ({'depth': 8, 'width': 128}, {})
        >>> host_of_recipe("listops")
        {'depth': 2, 'width': 64, 'heads': 2, 'dropout': 0.1}
        >>> host_of_recipe("capo-50k")
        {'depth': 8, 'width': 512, 'head_dim': 64, 'tied': True}
    """
    if recipe in ("", LANGUAGE):
        return {}
    check_option("recipe", recipe, recipes())
    source = STANDARDS[recipe]
    found = {"depth": source.layers, "width": min(source.width, default=None), "heads": source.heads,
             "head_dim": source.head_dim, "tied": source.tied or None,
             "dropout": source.dropout or None}  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _published_for(recipe: str, task: SequenceTask, batch_size: int | None) -> TextConfig:
    """The config of a recipe. Epochs are those of the task's examples, which a recipe of steps does not count."""
    standard = STANDARDS[recipe]
    examples = None if standard.steps is not None else task.train_size
    if standard.steps is None and standard.examples is None and examples is None:
        words = f"{recipe} counts epochs, and {task.name} has no end of training sequences: set its train_examples"
        raise OptionError("recipe", words)
    return published(standard, examples, batch_size)


def configure(
    task: SequenceTask, changes: Mapping[str, Any], recipe: str = "", tokens: int | None = None
) -> TextConfig:
    """A recipe with ``changes`` from a command line; None keeps the value of the recipe.

    ``clip_norm`` of 0 turns clipping off. ``tokens`` is a budget in tokens in place of steps: as many steps as begin
    within it. With another batch size, a recipe that counts epochs keeps their number, and one that counts steps keeps
    theirs. A warm-up that is not given keeps its share of the steps, and the lowest learning rate its share of the
    highest.

    Example:
        >>> from linattn.lab.tasks.text import text_task
        >>> config = configure(text_task("listops"), {"batch_size": 64, "lr": None}, tokens=64 * 2000 * 100)
        >>> config.steps, config.warmup_steps, config.lr
        (100, 20, 0.0001)
    """
    recipe = recipe or recipe_of(task)
    check_recipe(recipe, task)
    given = {name: value for name, value in changes.items() if value is not None}
    if "clip_norm" in given:
        given["clip_norm"] = given["clip_norm"] or None
    check_integer("batch_size", given.get("batch_size", 1), 1)
    plain = language() if recipe == LANGUAGE else _published_for(recipe, task, given.get("batch_size"))
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
