"""Options of training language models on tasks, and recipes: the settings of papers for those that are not given."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self, TypeVar

import torch

from linattn.lab.tasks.text import STANDARDS, SequenceTask, Standard, text_task
from linattn.lab.tasks.text.registry import task_class, usual_settings
from linattn.lab.tasks.text.task import once
from linattn.lab.train.config import Computing
from linattn.lab.train.text.hosts import HostShape
from linattn.support.config import Config, option
from linattn.support.options import OptionError, SettingError, check_device, check_graphs, check_integer, check_option
from linattn.support.schedule import Schedule

SETTINGS = ("data", "length", "tokenizer")  # settings of tasks that are options of commands, where they have them
LANGUAGE = "language"
# For text: the settings of Physics of Language Models 4.1, shortened for models of 10-100 M parameters.
OF_TEXT = Standard("", "arXiv:2512.17351", 32, (1e-3,), steps=5000, warmup=250, betas=(0.9, 0.98), floor=0.1)
RECIPES = {"": OF_TEXT, LANGUAGE: OF_TEXT, **STANDARDS}
SHAPE = ("length", "size")  # settings in which recipes of one task differ
# Default size of the host by task; other tasks have that of a language model.
SIZES_OF = {"mqar": "mqar", "listops": "lra", "lra": "lra", "pathfinder": "lra", "mad": "mad", "regbench": "mad"}
AnyConfig = TypeVar("AnyConfig", bound=Config)
BY_RECIPE = "by --recipe"
_of_training = partial(option, group="Training")
_of_recipe = partial(_of_training, default_text=BY_RECIPE)


@dataclass(frozen=True, kw_only=True)
class Budget(Computing):
    """How long and how language models are trained, whatever the learning rate and the seed."""

    steps: int = _of_recipe(1000, "Updates of the weights.", least=1)
    batch_size: int = _of_recipe(32, "Sequences of a step, over all processes.", least=1)
    accumulation: int = _of_training(1, "Compute a step in so many parts, to save memory.", least=1, rare=True)
    min_lr: float = _of_recipe(1e-5, "Learning rate of the last step.", least=0, rare=True)
    warmup_steps: int = _of_recipe(100, "Steps in which the learning rate rises.", least=0, rare=True)
    schedule: Schedule = option(
        "cosine", "How the learning rate falls: cosine or linear.", group="Training", rare=True, default_text=BY_RECIPE
    )
    weight_decay: float = _of_recipe(
        0.1, "Weight decay of matrices, without embeddings and a mechanism's own parameters.", least=0, rare=True
    )
    betas: tuple[float, float] = option((0.9, 0.95), "Betas of AdamW.", least=0, below=1, hidden=True)
    eps: float = option(1e-8, "Added to the denominator of AdamW's step.", above=0, hidden=True)
    clip_norm: float | None = _of_training(
        1.0, "Gradients longer than this are scaled down; none: not clipped.", least=0, rare=True
    )
    eval_every: int = _of_training(0, "Steps between evaluations; 0: one at the end.", least=0, rare=True)
    eval_batch_size: int | None = _of_training(
        None, "Sequences evaluated at a time.", least=1, rare=True, default_text="--batch-size"
    )

    @property
    def round_steps(self) -> int:
        """Steps from one evaluation to the next."""
        return min(self.eval_every, self.steps) or self.steps

    def check(self) -> None:
        super().check()
        if self.batch_size % self.accumulation:
            raise OptionError("accumulation", f"must divide batch_size = {self.batch_size}, got {self.accumulation}")
        if self.warmup_steps > self.steps:
            raise OptionError("warmup_steps", f"must not exceed steps = {self.steps}, got {self.warmup_steps}")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Budget):
    """How to train a language model; the same config and seed on the same kind of device give the same weights.

    Example:
        >>> TextConfig(steps=100, warmup_steps=10).round_steps
        100
        >>> TextConfig(steps=100, warmup_steps=200)
        Traceback (most recent call last):
        linattn.support.options.OptionError: warmup_steps: must not exceed steps = 100, got 200
    """

    lr: float = _of_recipe(1e-3, "Highest learning rate, at the end of the warm-up.", above=0)
    seed: int = _of_training(0, "Seed of first weights, order of data and draws.", least=0)
    device: str = option("cpu", "cpu, cuda or cuda:N.", group="Machine", default_text="cuda where there is one")

    def check(self) -> None:
        super().check()
        if self.min_lr > self.lr:
            raise OptionError("min_lr", f"must not exceed lr = {self.lr:g}, got {self.min_lr:g}")
        check_device(self.device)
        check_graphs(self.graphs, self.device)


def part_of(config: Config, kind: type[AnyConfig], **more: Any) -> AnyConfig:
    """A config of ``kind`` with the fields that ``config`` has too, and ``more``."""
    own = {field.name: getattr(config, field.name) for field in fields(kind) if hasattr(config, field.name)}
    return kind(**(own | more))


@dataclass(frozen=True, kw_only=True)
class OnTask(HostShape, Budget):
    """Options of commands that train on a task: what is not given comes from a recipe."""

    task: str = option(help="text, mqar, listops, lra-text, ...; a wrong one lists all.", group="Task")
    data: str | None = option(
        None, "A text file, also .gz or .jsonl, a folder of .txt files, or what the task asks for.", group="Task"
    )
    set: dict[str, Any] = option(
        {}, "Setting of the task: key=value; may be given again. A wrong one lists all.", group="Task"
    )
    recipe: str = _of_training(
        "", "A paper's settings and model for what is not given. A wrong name lists all.", default_text="by task"
    )
    tokens: int | None = _of_training(None, "Budget in tokens, in place of --steps.", least=1)

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> Self:
        """A config of the options given, and of the recipe for the others."""
        given = cls.typed(texts)
        name = given.get("task", cls.task if hasattr(cls, "task") else "")
        own = {key: given[key] for key in SETTINGS if given.get(key) is not None}
        with settings_named(cls):
            task = create_task(name, own | given.get("set", {}), given.get("recipe", ""))
        made = cls(**cls.by_recipe(task, given, given.get("recipe", "")))
        vars(made)["made"] = task
        return made

    @classmethod
    def by_recipe(cls, task: SequenceTask, given: Mapping[str, Any], recipe: str) -> dict[str, Any]:
        """The fields that are given, with those of the recipe for the others."""
        device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = device.startswith("cuda")
        host = {} if "size" in given else host_of_recipe(recipe)
        if given.get("heads"):
            host.pop("head_dim", None)
        found = {"size": size_of(task), **host, "precision": "bf16" if on_gpu else "fp32", "compile": on_gpu,
                 **given, "device": device}  # fmt: skip
        if found.get("clip_norm") == 0:
            found["clip_norm"] = None
        known = {field.name for field in fields(TextConfig)} | {"tokens"}
        found |= configure(task, {key: found[key] for key in found.keys() & known}, recipe) | {"tokens": None}
        return {field.name: found[field.name] for field in fields(cls) if field.name in found}

    @once
    def made(self) -> SequenceTask:
        """The task with its settings."""
        own = {key: value for key in SETTINGS if (value := getattr(self, key, None)) is not None}
        with settings_named(type(self)):
            return create_task(self.task, own | self.set, self.recipe)


@contextmanager
def settings_named(command: type) -> Iterator[None]:
    """Name the settings of tasks that are not options of ``command`` by ``--set``."""
    try:
        yield
    except OptionError as error:
        of_task = isinstance(error, SettingError) and error.option not in SETTINGS
        if error.option in {field.name for field in fields(command)} and not of_task:
            raise
        raise OptionError("set", f"{error.option}: {error.message}") from error


def published(standard: Standard, examples: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Fields of ``TextConfig`` with the numbers of a paper; of several learning rates, one from the middle.

    If the paper counts epochs, the steps are those that its epochs take for ``examples`` training sequences
    (``SequenceTask.train_size``; None: as many as in the paper) in batches of ``batch_size`` (None: as in the paper).
    """
    steps, batch = standard.steps, standard.batch_size if batch_size is None else batch_size
    if steps is None:
        examples = standard.examples if examples is None else examples
        if examples is None:
            raise OptionError("recipe", f"that of {standard.task} counts epochs, and there is no end of sequences")
        steps = max(1, (standard.epochs or 1) * examples // batch)
    lr = standard.learning_rates[len(standard.learning_rates) // 2]
    return {
        "steps": steps, "batch_size": batch, "lr": lr, "min_lr": standard.floor * lr,
        "warmup_steps": round(standard.warmup if standard.warmup >= 1 else standard.warmup * steps),
        "weight_decay": standard.weight_decays[-1], "schedule": standard.lr_schedule, "betas": standard.betas,
        "eps": standard.eps
    }  # fmt: skip


def recipe_of(task: str, given: Mapping[str, Any]) -> str:
    """The recipe for a task: that of its name and length, else the first of its name, else that of a language model.

    Settings that are not ``given`` have the task's defaults.
    """
    known = [name for name, standard in STANDARDS.items() if standard.task == task]
    if not known:
        return LANGUAGE
    usual = usual_settings(task)
    wanted = {name: given.get(name, usual[name]) for name in SHAPE if name in usual}
    fit = [name for name in known if wanted == {n: STANDARDS[name].settings.get(n, usual[n]) for n in wanted}]
    return [*fit, *known][0]


def recipe_named(name: str) -> Standard:
    check_option("recipe", name, list(RECIPES)[1:] if name else RECIPES)
    return RECIPES[name]


def recipe_settings(recipe: str, task: str) -> dict[str, Any]:
    """The task settings that a recipe has; none if it is one of another task."""
    source = recipe_named(recipe)
    return dict(source.settings) if source.task == task else {}


def create_task(name: str, settings: Mapping[str, Any], recipe: str = "") -> SequenceTask:
    """Create a task with the given settings, and those of the recipe for the others.

    If no recipe is named, it is the one that :func:`configure` uses for the budget, as numbers of epochs belong to
    certain data. The length that is given decides which recipe this is.
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
    """
    source = recipe_named(recipe)
    found = {"depth": source.layers, "width": min(source.width, default=None), "heads": source.heads,
             "head_dim": source.head_dim, "tied": source.tied or None, "dropout": source.dropout or None}  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def configure(task: SequenceTask, given: Mapping[str, Any], recipe: str = "") -> dict[str, Any]:
    """The fields of ``TextConfig`` in a recipe, with those that are ``given``.

    ``tokens`` among these is a budget in tokens in place of steps: as many steps as begin within it. With another batch
    size, a recipe that counts epochs keeps their number, and one that counts steps keeps theirs. A warm-up that is not
    given keeps its share of the steps, and the lowest learning rate its share of the highest. A recipe of another kind
    of task is refused, but for that of a language model, which tasks without a recipe use.

    Example:
        >>> found = configure(text_task("listops"), {"batch_size": 64, "tokens": 64 * 2000 * 100})
        >>> found["steps"], found["warmup_steps"], found["lr"]
        (100, 20, 0.0001)
    """
    recipe = recipe or recipe_of(task.name, {name: getattr(task, name) for name in SHAPE if hasattr(task, name)})
    standard = recipe_named(recipe)
    check_integer("batch_size", given.get("batch_size", 1), 1)
    kinds = {name: task_class(one.task).kind if one.task else task.kind for name, one in RECIPES.items() if name}
    if kinds[recipe] != task.kind:
        fit = ", ".join(name for name in kinds if kinds[name] == task.kind)
        words = f"{recipe} is for {kinds[recipe]} tasks, and {task.name} is {task.kind}"
        raise OptionError("recipe", f"{words}; must be one of {fit}")
    # Epochs are those of the task's examples, which a recipe of steps does not count.
    examples = None if standard.steps is not None else task.train_size
    plain = published(standard, examples, given.get("batch_size"))
    found = plain | dict(given)
    if (tokens := found.pop("tokens", None)) is not None:
        if "steps" in given:
            raise OptionError("tokens", "gives the budget, and so does steps: leave one of them out")
        found["steps"] = -(-tokens // (task.length * found["batch_size"]))
    if "warmup_steps" not in given:
        found["warmup_steps"] = found["steps"] * plain["warmup_steps"] // plain["steps"]
    if "min_lr" not in given:
        found["min_lr"] = found["lr"] * plain["min_lr"] / plain["lr"]
    return found
