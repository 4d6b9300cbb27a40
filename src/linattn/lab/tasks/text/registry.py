"""All sequence tasks by name, and published settings for training on them: numbers from papers and their code."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

from linattn.lab.tasks.text.task import SequenceTask
from linattn.support.config import option_of
from linattn.support.options import OptionError, SettingError, check_option

# Name -> class and its module below linattn.lab.tasks, which is imported when its task is first used.
TASKS = {
    "text": "text.language:Text",
    "masked-text": "text.language:MaskedText",
    "mqar": "text.recall:Mqar",
    "mqar-mix": "text.recall:MqarMix",
    "mad-recall": "text.recall:InContextRecall",
    "mad-noisy-recall": "text.recall:NoisyRecall",
    "mad-fuzzy-recall": "text.recall:FuzzyRecall",
    "mad-selective-copying": "text.recall:SelectiveCopying",
    "mad-compression": "text.recall:Compression",
    "mad-memorization": "text.recall:Memorization",
    "regbench": "text.regbench:RegBench",
    "listops": "text.listops:ListOps",
    "lra-text": "text.labelled:LraText",
    "lra-image": "text.labelled:LraImage",
    "pathfinder": "text.pathfinder:Pathfinder",
    "passkey": "text.passkey:Passkey",
    "glue": "text.labelled:Glue",
    "stsb": "text.labelled:Similarity",
    "depo": "synthetic.depo:Depo",
    "brevo": "synthetic.brevo:Brevo",
    "capo": "synthetic.capo:Capo",
    "mano": "synthetic.mano:Mano",
    "lano": "synthetic.lano:Lano",
}


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


ZOOLOGY = "Zoology, arXiv:2312.04927, figure 2 and its repository; no feed-forward"
MAD = "MAD, arXiv:2403.17844 and its repository"
REGBENCH = "arXiv:2401.12973 and its repository"
NYSTROM = "the PyTorch setting of linear-attention papers, from Nystromformer's repository"
S5 = "sizes of S5 (arXiv:2208.04933), which LION (NeurIPS 2025) uses with AdamW at 5e-4; weight decay of S4"
LRA_EXAMPLES = {"listops": 96_000, "lra-text": 25_000, "lra-image": 45_000, "pathfinder": 160_000}
MAD_RATES = (1e-4, 5e-4, 1e-3)
MAD_TASKS = ("recall", "noisy-recall", "fuzzy-recall", "selective-copying", "compression", "memorization")
# As in the arena's program at 128 pixels: 35 // 4 short curves of 14 // 3 dashes, gaps of twice its smaller margin.
PATH_X: dict[str, Any] = {
    "size": 128, "dash": 5.0, "gap": 4.0, "separation": 5.0, "thickness": 1.5, "marker": 3.0, "seed_distance": 20.0,
    "continuity": 1.8, "distractors": 8, "distractor_contour": 4, "contrast": 0.9,
}  # fmt: skip
ZOOLOGY_RATES = (1e-4, 4.64e-4, 2.15e-3, 1e-2)  # equal in ratio


def _mqar(length: int, pairs: int, batch_size: int) -> Standard:
    return Standard(
        "mqar", ZOOLOGY, batch_size, ZOOLOGY_RATES, epochs=64, layers=2, width=(64, 128, 256, 512), examples=100_000,
        settings={"vocab": 8192, "length": length, "pairs": pairs, "train_examples": 100_000, "test_examples": 3000},
    )  # fmt: skip


def _mad(task: str) -> Standard:
    examples = 256 if task == "memorization" else 12_800
    return Standard(
        f"mad-{task}", MAD, 128, MAD_RATES, (0.0, 0.1), epochs=200, layers=2, width=(128,), examples=examples,
        settings={"train_examples": examples, "test_examples": 1280}, floor=1e-6 / MAD_RATES[1],
    )  # fmt: skip


def _lra(task: str, batch_size: int, steps: int, warmup: int, **settings: Any) -> Standard:
    return Standard(
        task, NYSTROM, batch_size, (1e-4,), (0.0,), steps=steps, warmup=warmup, lr_schedule="linear", layers=2,
        width=(64,), heads=2, examples=LRA_EXAMPLES[task], settings=settings, dropout=0.1,
    )  # fmt: skip


def _s5(task: str, layers: int, width: int, batch_size: int, epochs: int, **settings: Any) -> Standard:
    return Standard(
        task, S5, batch_size, (5e-4,), (0.05,), epochs=epochs, layers=layers, width=(width,),
        examples=LRA_EXAMPLES[task], settings=settings,
    )  # fmt: skip


# Task -> batch size, then epochs, learning rate and weight decay of base, then epochs and weight decay of large. The
# last is that of the source's code; the paper prints 3e-5 for STS-B.
TABLE = {
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
LARGE_RATE = 1e-5
PLAIN = ("glue-cola", "glue-large-rte")  # trained with PyTorch's AdamW in the source too


def _glue() -> dict[str, Standard]:
    """Fine-tuning on GLUE: ``glue-rte`` for the base model of ``masked-text``, ``glue-large-rte`` for 24 layers.

    ``glue`` and ``glue-large`` have the numbers of MNLI, the largest. Files do not tell which task they are of, so name
    the recipe of the task. RTE, MRPC and STS-B start from a model that was tuned on MNLI.

    The weight decay of the source is the share of the weights that a step at the highest learning rate subtracts,
    whatever that rate is (``DecoupledAdamW``). PyTorch's AdamW subtracts the rate times the decay.
    """
    found = {}
    for task, (batch, epochs, lr, decay, large_epochs, large_decay) in TABLE.items():
        ending = "" if task == "mnli" else f"-{task}"
        for name, source, rate, share, rounds, layers, width in (
            (f"glue{ending}", BASE, lr, decay, epochs, 12, 768),
            (f"glue-large{ending}", LARGE, LARGE_RATE, large_decay, large_epochs, 24, 1024),
        ):
            found[name] = Standard(
                "stsb" if task == "stsb" else "glue", source, batch, (rate,),
                (share if name in PLAIN else share / rate,), epochs=rounds, warmup=0.06, lr_schedule="linear",
                layers=layers, width=(width,), heads=width // 64, betas=(0.9, 0.98), eps=1e-6,
                settings={"length": 128},
            )  # fmt: skip
    return found


PAPER = "Physics of Language Models 4.1, arXiv:2512.17351"
RELEASED = f"{PAPER}, its released code"
STEPS = (100_000, 125_000, 150_000)  # of Depo2 and Brevo1, by size
CAPO = {50_000: 12, 100_000: 24, 200_000: 48, 500_000: 96, 1_000_000: 192, 2_000_000: 384}  # people -> batch size
EXPOSURES = 100
PEOPLE_OF_WINDOW = 10  # of 512 tokens


def _of_paper(task: str, batch_size: int, steps: int, settings: dict[str, Any], **other: Any) -> Standard:
    shared: dict[str, Any] = {
        "source": PAPER, "learning_rates": (3e-4, 5e-4, 1e-3, 2e-3), "weight_decays": (0.03,), "warmup": 1000,
        "layers": 8, "width": (512, 768), "head_dim": 64, "betas": (0.9, 0.98), "floor": 0.1,
    }  # fmt: skip
    return Standard(task=task, batch_size=batch_size, steps=steps, settings=settings, **(shared | other))


def _controlled() -> dict[str, Standard]:
    """The tasks of Physics of Language Models 4.1.

    Depo2 and Brevo differ between the paper and its released code; settings of the code have names in ``-released``.
    """
    found = {}
    for name, letters, word_length, hops, source, sizes in (
        ("depo1-{}", 50, (1, 2), 8, PAPER, (225, 300, 375)),
        ("depo1-{}-4hops", 50, (1, 2), 4, PAPER, (225, 300, 375)),
        ("depo2-{}", 4, (5, 7), 16, PAPER, (75, 100, 125)),
        ("depo2-{}-4hops", 4, (5, 7), 4, PAPER, (75, 100, 125)),
        ("depo2-{}-released", 3, (5, 7), 16, RELEASED, (75, 100, 125)),
    ):
        for nodes, steps in zip(sizes, (87_500, 100_000, 112_500) if letters == 50 else STEPS, strict=True):
            words = {"letters": letters, "word_length": word_length}
            settings = words | {"nodes": nodes, "hops": hops, "length": 2048}
            found[name.format(nodes)] = _of_paper("depo", 128, steps, settings, source=source, eps=1e-6)
    for which, source, ending in (("paper", PAPER, ""), ("released", RELEASED, "-released")):
        for nodes, steps in zip((70, 90, 110), STEPS, strict=True):
            settings = {"nodes": nodes, "source": which, "length": 1024}
            found[f"brevo1-{nodes}{ending}"] = _of_paper("brevo", 256, steps, settings, source=source, eps=1e-6)
        for nodes, steps in ((30, 200_000), (40, 225_000), (50, 250_000)):
            settings = {"nodes": nodes, "letters": 4, "word_length": (2, 4), "source": which, "length": 1536}
            found[f"brevo2-{nodes}{ending}"] = _of_paper("brevo", 192, steps, settings, source=source, eps=1e-6)
    for operations, steps in ((10, 80_000), (13, 95_000), (16, 110_000)):
        found[f"mano-{operations}"] = _of_paper(
            "mano", 64, steps, {"operations": operations, "length": 1024},
            learning_rates=(1e-4, 2e-4, 3e-4, 5e-4), weight_decays=(0.1,),
        )  # fmt: skip
    for grammar, length in (("cfg3f", 512), ("cfg3j", 1536), ("cfg3k", 1536)):
        found[f"lano-{grammar[-1]}"] = _of_paper(
            "lano", 96, 100_000, {"grammar": grammar, "length": length}, warmup=0, lr_schedule="linear", floor=0.0,
            learning_rates=(2e-4, 3e-4, 5e-4, 1e-3), weight_decays=(0.1,),
        )  # fmt: skip
    for people, batch in CAPO.items():
        found[f"capo-{people // 1000}k"] = _of_paper(
            "capo", batch, EXPOSURES * people // (batch * PEOPLE_OF_WINDOW), {"people": people, "length": 512},
            learning_rates=(3e-4, 5e-4) if people > 1_000_000 else (5e-4, 1e-3), weight_decays=(0.01,), tied=True,
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
    **{f"mad-{task}": _mad(task) for task in MAD_TASKS},
    "regbench": Standard(
        "regbench", REGBENCH, 32, (2.5e-4, 5e-4, 1e-3), epochs=200, warmup=0.1, layers=8, width=(256, 512, 1024),
        heads=2, examples=5000, settings={"train_examples": 5000, "test_examples": 500},
    ),
    "listops": _lra("listops", 32, 5000, 1000, train_examples=96_000, test_examples=2000),
    "lra-text": _lra("lra-text", 32, 20_000, 8000, length=4096),
    "lra-image": _lra("lra-image", 256, 35_000, 175),
    "pathfinder": _lra("pathfinder", 256, 62_400, 312, train_examples=160_000, test_examples=20_000),
    "listops-s5": _s5("listops", 8, 128, 50, 40, train_examples=96_000, test_examples=2000),
    "lra-text-s5": _s5("lra-text", 6, 256, 50, 35, length=4096),
    "lra-image-s5": _s5("lra-image", 6, 512, 50, 250),
    "pathfinder-s5": _s5("pathfinder", 6, 192, 64, 200, train_examples=160_000, test_examples=20_000),
    "path-x-s5": _s5("pathfinder", 6, 128, 32, 75, train_examples=160_000, test_examples=20_000, **PATH_X),
    "masked-text": Standard(
        "masked-text", "LION (NeurIPS 2025) after M2-BERT base", 4096, (8e-4,), (1e-5 / 8e-4,), steps=70_000,
        warmup=0.06, lr_schedule="linear", floor=0.02, layers=12, width=(768,), heads=12, betas=(0.9, 0.98), eps=1e-6,
        settings={"length": 128, "share": 0.3, "test_share": 0.15},
    ),
    **_glue(),
    **_controlled(),
})  # fmt: skip
