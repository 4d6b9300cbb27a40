"""All sequence tasks by name, and published settings for training on them: numbers from papers and their code."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

from linattn.lab.tasks.text.task import SequenceTask
from linattn.support.config import option_of
from linattn.support.options import OptionError, SettingError, check_option

# The tasks of each module below linattn.lab.tasks, which is imported when one is first used.
MODULES = {
    "text.language": "text masked-text passkey",
    "text.recall": "mqar mqar-mix mad-recall mad-noisy-recall mad-fuzzy-recall mad-selective-copying mad-compression "
    "mad-memorization",
    "text.regbench": "regbench",
    "text.arena": "listops pathfinder",
    "text.labelled": "lra-text lra-image glue stsb",
    **{f"synthetic.{name}": name for name in ("depo", "brevo", "capo", "mano", "lano")},
}
TASKS = {name: module for module, names in MODULES.items() for name in names.split()}


def task_class(name: str) -> type[SequenceTask]:
    check_option("task", name, TASKS)
    there = vars(import_module(f"linattn.lab.tasks.{TASKS[name]}")).values()
    found: type[SequenceTask] = next(cls for cls in there if getattr(cls, "name", None) == name)
    return found


def text_task(name: str, **settings: Any) -> SequenceTask:
    """Create a task with its default settings, changed by ``settings``; lists pass for tuples, texts are parsed.

    Example:
        >>> task = text_task("mqar", vocab=64, length=32, pairs=4)
        >>> task.kind, task.vocabulary, task.length, task.test_examples
        ('causal', 64, 32, 3000)
        >>> task.train_batch(8, seed=0, step=0).inputs.shape
        torch.Size([8, 32])
    """
    cls = task_class(name)
    for own in fields(cls):
        if own.default is MISSING and own.name not in settings:
            raise SettingError(own.name, f"{name} needs {option_of(own).help}")
    try:
        return cls.parse(settings)
    except OptionError as error:
        raise SettingError(error.option, error.message) from error


def usual_settings(name: str) -> dict[str, Any]:
    """The settings of a task that have a default, with their defaults."""
    return {own.name: own.default for own in fields(task_class(name)) if own.default is not MISSING}


@dataclass(frozen=True)
class Standard:
    """One published setting.

    Attributes:
        task: name for ``text_task``; ``source``: where the numbers are from.
        learning_rates: all rates that were tried, the same for every model.
        weight_decays: for PyTorch's AdamW, which multiplies them by the learning rate.
        steps, epochs: the budget of training, in steps or in epochs; the other is None.
        warmup: steps of warm-up, or their share of all steps if below 1.
        layers, width, heads, head_dim, tied: the shape of the model, a layer being a mixer and what follows it; None
            and () where the source tries several. ``tied``: embeddings and head share one matrix.
        examples: training examples of an epoch, if the source has a number; None: as many as the files hold.
        settings: settings of the task that differ from its defaults.
        floor: the lowest learning rate, as a share of the highest.
    """

    task: str
    source: str
    batch_size: int
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...] = (0.1,)
    steps: int | None = None
    epochs: int | None = None
    warmup: float = 0
    lr_schedule: Literal["cosine", "linear"] = "cosine"
    layers: int | None = None
    width: tuple[int, ...] = ()
    heads: int | None = None
    examples: int | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    betas: tuple[float, float] = (0.9, 0.999)
    floor: float = 0.0
    eps: float = 1e-8
    head_dim: int | None = None
    tied: bool = False
    dropout: float = 0.0


PAPER = "Physics of Language Models 4.1, arXiv:2512.17351"
RELEASED = f"{PAPER}, its released code"
LRA_EXAMPLES = {"listops": 96_000, "lra-text": 25_000, "lra-image": 45_000, "pathfinder": 160_000}
MAD = ("recall", "noisy-recall", "fuzzy-recall", "selective-copying", "compression", "memorization")
# As in the arena's program at 128 pixels: 35 // 4 short curves of 14 // 3 dashes, gaps of twice its smaller margin.
PATH_X: dict[str, Any] = {
    "size": 128, "dash": 5.0, "gap": 4.0, "separation": 5.0, "thickness": 1.5, "marker": 3.0, "seed_distance": 20.0,
    "continuity": 1.8, "distractors": 8, "distractor_contour": 4, "contrast": 0.9,
}  # fmt: skip
# What settings of one source have in common.
COMMON: dict[str, dict[str, Any]] = {
    "mqar": {
        "source": "Zoology, arXiv:2312.04927, figure 2 and its repository; no feed-forward", "epochs": 64, "layers": 2,
        "learning_rates": (1e-4, 4.64e-4, 2.15e-3, 1e-2), "width": (64, 128, 256, 512), "examples": 100_000,
    },
    "mad": {
        "source": "MAD, arXiv:2403.17844 and its repository", "batch_size": 128, "learning_rates": (1e-4, 5e-4, 1e-3),
        "weight_decays": (0.0, 0.1), "epochs": 200, "layers": 2, "width": (128,), "floor": 1e-6 / 5e-4,
    },
    "lra": {
        "source": "the PyTorch setting of linear-attention papers, from Nystromformer's repository", "heads": 2,
        "learning_rates": (1e-4,), "weight_decays": (0.0,), "lr_schedule": "linear", "layers": 2, "width": (64,),
        "dropout": 0.1,
    },
    "s5": {
        "source": "sizes of S5 (arXiv:2208.04933), which LION (NeurIPS 2025) uses with AdamW at 5e-4; weight decay of "
        "S4", "learning_rates": (5e-4,), "weight_decays": (0.05,),
    },
    "glue": {"warmup": 0.06, "lr_schedule": "linear", "betas": (0.9, 0.98), "eps": 1e-6},
    "paper": {
        "source": PAPER, "learning_rates": (3e-4, 5e-4, 1e-3, 2e-3), "weight_decays": (0.03,), "warmup": 1000,
        "layers": 8, "width": (512, 768), "head_dim": 64, "betas": (0.9, 0.98), "floor": 0.1,
    },
}  # fmt: skip
FIELDS = {own.name for own in fields(Standard)} - {"settings"}


def _of(common: str, task: str, batch_size: int, **own: Any) -> Standard:
    """A standard with what its source has in common; what is no field of it is a setting of the task."""
    given = COMMON[common] | {"task": task, "batch_size": batch_size} | own
    settings = {name: value for name, value in own.items() if name not in FIELDS}
    return Standard(**{name: given[name] for name in given if name in FIELDS}, settings=settings)


def _mqar(length: int, pairs: int, batch_size: int) -> Standard:
    sizes = {"train_examples": 100_000, "test_examples": 3000}
    return _of("mqar", "mqar", batch_size, vocab=8192, length=length, pairs=pairs, **sizes)


def _mad(task: str) -> Standard:
    examples = 256 if task == "memorization" else 12_800
    return _of("mad", f"mad-{task}", 128, examples=examples, train_examples=examples, test_examples=1280)


def _lra(common: str, task: str, batch_size: int, **own: Any) -> Standard:
    tests = {"listops": 2000, "pathfinder": 20_000}  # the others are files
    if task in tests:
        own |= {"train_examples": LRA_EXAMPLES[task], "test_examples": tests[task]}
    return _of(common, task, batch_size, examples=LRA_EXAMPLES[task], **own)


# Task -> batch size, then epochs, learning rate and weight decay of base, then epochs and weight decay of large. The
# last is that of the source's code; the paper prints 3e-5 for STS-B.
GLUE = {
    "mnli": (48, 3, 5e-5, 5e-6, 3, 5e-6),
    "qnli": (16, 10, 5e-5, 1e-6, 10, 1e-6),
    "qqp": (16, 5, 3e-5, 3e-6, 5, 3e-6),
    "rte": (16, 3, 1e-5, 1e-6, 2, 1e-6),
    "sst2": (16, 3, 3e-5, 3e-6, 3, 3e-6),
    "mrpc": (32, 10, 8e-5, 8e-5, 10, 8e-6),
    "cola": (32, 10, 8e-5, 5e-6, 10, 1e-6),
    "stsb": (32, 10, 8e-5, 3e-6, 8, 3e-6),
}
BASE = "LION (NeurIPS 2025) after M2-BERT base, from M2's repository"
LARGE = "LION (NeurIPS 2025), large: M2-BERT's with every learning rate 1e-5"
PLAIN = ("glue-cola", "glue-large-rte")  # trained with PyTorch's AdamW in the source too


def _glue() -> dict[str, Standard]:
    """Fine-tuning on GLUE: ``glue-rte`` for the base model of ``masked-text``, ``glue-large-rte`` for 24 layers.

    ``glue`` and ``glue-large`` have the numbers of MNLI, the largest. Files do not tell which task they are of, so name
    the recipe of the task. RTE, MRPC and STS-B start from a model that was tuned on MNLI.

    The weight decay of the source is the share of the weights that a step at the highest learning rate subtracts,
    whatever that rate is (``DecoupledAdamW``). PyTorch's AdamW subtracts the rate times the decay.
    """
    found = {}
    for name, (batch, epochs, lr, decay, large_epochs, large_decay) in GLUE.items():
        for size, source, rate, share, rounds, layers, width in (
            ("glue", BASE, lr, decay, epochs, 12, 768),
            ("glue-large", LARGE, 1e-5, large_decay, large_epochs, 24, 1024),
        ):
            recipe = size if name == "mnli" else f"{size}-{name}"
            found[recipe] = _of(
                "glue", "stsb" if name == "stsb" else "glue", batch, source=source, learning_rates=(rate,),
                weight_decays=(share if recipe in PLAIN else share / rate,), epochs=rounds, layers=layers,
                width=(width,), heads=width // 64, length=128,
            )  # fmt: skip
    return found


def _controlled() -> dict[str, Standard]:
    """The tasks of Physics of Language Models 4.1.

    Depo2 and Brevo differ between the paper and its released code; settings of the code have names in ``-released``.
    """
    found = {}
    for name, letters, word_length, hops, source in (
        ("depo1-{}", 50, (1, 2), 8, PAPER),
        ("depo1-{}-4hops", 50, (1, 2), 4, PAPER),
        ("depo2-{}", 4, (5, 7), 16, PAPER),
        ("depo2-{}-4hops", 4, (5, 7), 4, PAPER),
        ("depo2-{}-released", 3, (5, 7), 16, RELEASED),
    ):
        long = {75: 100_000, 100: 125_000, 125: 150_000}
        for nodes, steps in ({225: 87_500, 300: 100_000, 375: 112_500} if letters == 50 else long).items():
            found[name.format(nodes)] = _of(
                "paper", "depo", 128, source=source, steps=steps, eps=1e-6, letters=letters, word_length=word_length,
                nodes=nodes, hops=hops, length=2048,
            )  # fmt: skip
    for ending, source in (("", PAPER), ("-released", RELEASED)):
        for number, batch, sizes, words in (
            (1, 256, {70: 100_000, 90: 125_000, 110: 150_000}, {"length": 1024}),
            (2, 192, {30: 200_000, 40: 225_000, 50: 250_000}, {"letters": 4, "word_length": (2, 4), "length": 1536}),
        ):
            for nodes, steps in sizes.items():
                made = _of("paper", "brevo", batch, source=source, steps=steps, eps=1e-6, nodes=nodes, **words)
                settings = {**made.settings, "source": ending[1:] or "paper"}
                found[f"brevo{number}-{nodes}{ending}"] = replace(made, settings=settings)
    for operations, steps in ((10, 80_000), (13, 95_000), (16, 110_000)):
        found[f"mano-{operations}"] = _of(
            "paper", "mano", 64, steps=steps, learning_rates=(1e-4, 2e-4, 3e-4, 5e-4), weight_decays=(0.1,),
            operations=operations, length=1024,
        )  # fmt: skip
    for grammar, length in (("cfg3f", 512), ("cfg3j", 1536), ("cfg3k", 1536)):
        found[f"lano-{grammar[-1]}"] = _of(
            "paper", "lano", 96, steps=100_000, warmup=0, lr_schedule="linear", floor=0.0,
            learning_rates=(2e-4, 3e-4, 5e-4, 1e-3), weight_decays=(0.1,), grammar=grammar, length=length,
        )  # fmt: skip
    for thousands, batch in {50: 12, 100: 24, 200: 48, 500: 96, 1000: 192, 2000: 384}.items():
        found[f"capo-{thousands}k"] = _of(
            "paper", "capo", batch, steps=100 * 1000 * thousands // (batch * 10),  # 100 times all, 10 in a window
            learning_rates=(3e-4, 5e-4) if thousands > 1000 else (5e-4, 1e-3), weight_decays=(0.01,), tied=True,
            people=1000 * thousands, length=512,
        )  # fmt: skip
    return found


STANDARDS: Mapping[str, Standard] = MappingProxyType({
    "mqar-64": _mqar(64, 4, 512),
    "mqar-128": _mqar(128, 8, 512),
    "mqar-256": _mqar(256, 16, 256),
    "mqar-512": _mqar(512, 64, 128),
    "mqar-mix": Standard(
        "mqar-mix", "Based, arXiv:2402.18668, figure 2, and Zoology's repository", 256,
        (1e-3, 3.16e-3, 1e-2, 3.16e-2), epochs=32, layers=2, examples=180_000,
    ),
    **{f"mad-{task}": _mad(task) for task in MAD},
    "regbench": Standard(
        "regbench", "arXiv:2401.12973 and its repository", 32, (2.5e-4, 5e-4, 1e-3), epochs=200, warmup=0.1, layers=8,
        width=(256, 512, 1024), heads=2, examples=5000, settings={"train_examples": 5000, "test_examples": 500},
    ),
    "listops": _lra("lra", "listops", 32, steps=5000, warmup=1000),
    "lra-text": _lra("lra", "lra-text", 32, steps=20_000, warmup=8000, length=4096),
    "lra-image": _lra("lra", "lra-image", 256, steps=35_000, warmup=175),
    "pathfinder": _lra("lra", "pathfinder", 256, steps=62_400, warmup=312),
    "listops-s5": _lra("s5", "listops", 50, layers=8, width=(128,), epochs=40),
    "lra-text-s5": _lra("s5", "lra-text", 50, layers=6, width=(256,), epochs=35, length=4096),
    "lra-image-s5": _lra("s5", "lra-image", 50, layers=6, width=(512,), epochs=250),
    "pathfinder-s5": _lra("s5", "pathfinder", 64, layers=6, width=(192,), epochs=200),
    "path-x-s5": _lra("s5", "pathfinder", 32, layers=6, width=(128,), epochs=75, **PATH_X),
    "masked-text": Standard(
        "masked-text", "LION (NeurIPS 2025) after M2-BERT base", 4096, (8e-4,), (1e-5 / 8e-4,), steps=70_000,
        warmup=0.06, lr_schedule="linear", floor=0.02, layers=12, width=(768,), heads=12, betas=(0.9, 0.98), eps=1e-6,
        settings={"length": 128, "share": 0.3, "test_share": 0.15},
    ),
    **_glue(),
    **_controlled(),
})  # fmt: skip
