"""Recipes for sequence tasks: options of commands with the settings of papers."""

from collections.abc import Mapping
from typing import Any

from linattn.lab.tasks.text import STANDARDS, SequenceTask, Standard, text_task
from linattn.lab.tasks.text.registry import task_class, usual_settings
from linattn.support.options import OptionError, check_integer, check_option

LANGUAGE = "language"
SHAPE = ("length", "size")  # settings in which recipes of one task differ
# Default size of the host by task; other tasks have that of a language model.
SIZES_OF = {"mqar": "mqar", "listops": "lra", "lra": "lra", "pathfinder": "lra", "mad": "mad", "regbench": "mad"}
# For text: the settings of Physics of Language Models 4.1, shortened for models of 10-100 M parameters.
OF_TEXT: dict[str, Any] = {
    "steps": 5000, "batch_size": 32, "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 250, "weight_decay": 0.1,
    "betas": (0.9, 0.98),
}  # fmt: skip


def published(standard: Standard, examples: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Fields of ``TextConfig`` with the numbers of a paper; of several learning rates, one from the middle.

    If the paper counts epochs, the steps are those that its epochs take for ``examples`` training sequences
    (``SequenceTask.train_size``; None: as many as in the paper) in batches of ``batch_size`` (None: as in the paper).

    Example:
        >>> found = published(STANDARDS["listops"])
        >>> found["steps"], found["batch_size"], found["lr"], found["warmup_steps"], found["schedule"]
        (5000, 32, 0.0001, 1000, 'linear')
        >>> published(STANDARDS["mqar-mix"])["steps"], published(STANDARDS["mqar-mix"], 90_000)["steps"]
        (22500, 11250)
    """
    steps, batch = standard.steps, standard.batch_size if batch_size is None else batch_size
    if steps is None:
        examples = standard.examples if examples is None else examples
        if examples is None:
            raise OptionError("examples", f"must be given: {standard.task} has as many as its files hold, got None")
        steps = max(1, (standard.epochs or 1) * examples // batch)
    lr = standard.learning_rates[len(standard.learning_rates) // 2]
    return {
        "steps": steps, "batch_size": batch, "lr": lr, "min_lr": standard.floor * lr,
        "warmup_steps": round(standard.warmup if standard.warmup >= 1 else standard.warmup * steps),
        "weight_decay": standard.weight_decays[-1], "schedule": standard.lr_schedule, "betas": standard.betas,
        "eps": standard.eps,
    }  # fmt: skip


def recipes() -> list[str]:
    return [LANGUAGE, *STANDARDS]


def recipe_of(task: str, given: Mapping[str, Any]) -> str:
    """The recipe for a task: that of its name and length, else the first of its name, else that of a language model.

    Settings that are not ``given`` have the task's defaults.

    Example:
        >>> recipe_of("mqar", {"length": 512, "pairs": 64}), recipe_of("passkey", {})
        ('mqar-512', 'language')
    """
    known = [name for name, standard in STANDARDS.items() if standard.task == task]
    if not known:
        return LANGUAGE
    usual = usual_settings(task)
    wanted = {name: given.get(name, usual[name]) for name in SHAPE if name in usual}
    fit = [name for name in known if wanted == {n: STANDARDS[name].settings.get(n, usual[n]) for n in wanted}]
    return [*fit, *known][0]


def recipe_settings(recipe: str, task: str) -> dict[str, Any]:
    """The task settings that a recipe has; none if it is one of another task."""
    if recipe in ("", LANGUAGE):
        return {}
    check_option("recipe", recipe, recipes())
    return dict(STANDARDS[recipe].settings) if STANDARDS[recipe].task == task else {}


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
    if recipe:
        return text_task(name, **recipe_settings(recipe, name) | dict(settings))
    task_class(name)  # an unknown name is refused
    brought = recipe_settings(recipe_of(name, settings), name)
    # The recipe was not named, so given settings come first. If the two are not compatible, only the sizes of sets are
    # taken from the recipe, and if these are not compatible either, nothing.
    for some in (brought, {key: value for key, value in brought.items() if key.endswith("_examples")}):
        try:
            return text_task(name, **(some | dict(settings)))
        except OptionError:
            continue
    return text_task(name, **settings)


def size_of(task: SequenceTask) -> str:
    """The default size of the host for a task."""
    return SIZES_OF.get(task.name, SIZES_OF.get(task.name.split("-")[0], "small"))


def host_of_recipe(recipe: str) -> dict[str, Any]:
    """Depth, width, heads and dropout of the model that a recipe is for, as fields of ``Host``.

    Only what its source specifies; the smallest of several widths. Empty if no recipe is named, as the default host of
    a task is small.

    Example:
        >>> host_of_recipe("listops-s5"), host_of_recipe("")
        ({'depth': 8, 'width': 128}, {})
        >>> host_of_recipe("capo-50k")
        {'depth': 8, 'width': 512, 'head_dim': 64, 'tied': True}
    """
    if recipe in ("", LANGUAGE):
        return {}
    check_option("recipe", recipe, recipes())
    source = STANDARDS[recipe]
    found = {"depth": source.layers, "width": min(source.width, default=None), "heads": source.heads,
             "head_dim": source.head_dim, "tied": source.tied or None, "dropout": source.dropout or None}  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def check_recipe(recipe: str, task: SequenceTask) -> None:
    """Raise ``OptionError`` for a recipe of a different kind of task, whose budget and host are not for this one.

    The recipe of a language model is allowed for all tasks: those without a recipe use it.
    """
    check_option("recipe", recipe, recipes())
    kinds = {name: task_class(standard.task).kind for name, standard in STANDARDS.items()} | {LANGUAGE: task.kind}
    if kinds[recipe] != task.kind:
        fit = ", ".join(name for name in recipes() if kinds[name] == task.kind)
        words = f"{recipe} is for {kinds[recipe]} tasks, and {task.name} is {task.kind}; must be one of {fit}"
        raise OptionError("recipe", words)


def configure(task: SequenceTask, given: Mapping[str, Any], recipe: str = "") -> dict[str, Any]:
    """The fields of ``TextConfig`` in a recipe, with those that are ``given``.

    ``tokens`` among these is a budget in tokens in place of steps: as many steps as begin within it. With another batch
    size, a recipe that counts epochs keeps their number, and one that counts steps keeps theirs. A warm-up that is not
    given keeps its share of the steps, and the lowest learning rate its share of the highest.

    Example:
        >>> found = configure(text_task("listops"), {"batch_size": 64, "tokens": 64 * 2000 * 100})
        >>> found["steps"], found["warmup_steps"], found["lr"]
        (100, 20, 0.0001)
    """
    recipe = recipe or recipe_of(task.name, {name: getattr(task, name) for name in SHAPE if hasattr(task, name)})
    check_recipe(recipe, task)
    check_integer("batch_size", given.get("batch_size", 1), 1)
    plain = dict(OF_TEXT)
    if recipe != LANGUAGE:
        standard = STANDARDS[recipe]
        # Epochs are those of the task's examples, which a recipe of steps does not count.
        examples = None if standard.steps is not None else task.train_size
        if standard.steps is None and standard.examples is None and examples is None:
            words = f"{recipe} counts epochs, and {task.name} has no end of training sequences: set its train_examples"
            raise OptionError("recipe", words)
        plain = published(standard, examples, given.get("batch_size"))
    found = plain | dict(given)
    if (tokens := found.pop("tokens", None)) is not None:
        if "steps" in given:
            raise OptionError("tokens", "gives the budget, and so does steps: leave one of them out")
        check_integer("tokens", tokens, 1)
        found["steps"] = -(-tokens // (task.length * found["batch_size"]))
    if "warmup_steps" not in given:
        found["warmup_steps"] = found["steps"] * plain["warmup_steps"] // plain["steps"]
    if "min_lr" not in given:
        found["min_lr"] = found["lr"] * plain["min_lr"] / plain["lr"]
    return found
