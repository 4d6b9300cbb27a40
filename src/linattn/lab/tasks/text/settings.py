"""Published settings for training on tasks: numbers from papers and from the code released with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from linattn.lab.tasks.synthetic.published import PUBLISHED
from linattn.lab.tasks.text.glue_settings import GLUE, of_rate
from linattn.support.options import check_option


@dataclass(frozen=True)
class Standard:
    """One published setting.

    Attributes:
        task: name for ``text_task``; ``settings`` are those that differ from its defaults.
        batch_size, steps, epochs: the budget of training, in steps or in epochs; the other is None.
        weight_decays: for PyTorch's AdamW, which multiplies them by the learning rate.
        learning_rates: all rates that were tried, the same for every model; ``lr_schedule`` says how a rate falls.
        warmup: steps of warm-up, or their share of all steps if below 1.
        layers, width, heads: shape of the model, a layer being a mixer and what follows it; None and () where the
            source tries several or says nothing.
        examples: training examples of an epoch, if the source has a number; None: as many as the files hold.
        source: where the numbers are from.
        betas, eps: options of AdamW.
        floor: the lowest learning rate, as a share of the highest.
        head_dim: channels of a head, if the source fixes these and not the number of heads.
        tied: whether embeddings and head share one matrix.
        dropout: of the model.
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


def _mad(task: str, **settings: Any) -> Standard:
    settings = {"train_examples": 12_800, "test_examples": 1280} | settings
    return Standard(
        f"mad-{task}", MAD, 128, MAD_RATES, (0.0, 0.1), epochs=200, layers=2, width=(128,),
        examples=settings["train_examples"], settings=settings, floor=1e-6 / MAD_RATES[1],
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


STANDARDS: Mapping[str, Standard] = MappingProxyType({
    "mqar-64": _mqar(64, 4, 512),
    "mqar-128": _mqar(128, 8, 512),
    "mqar-256": _mqar(256, 16, 256),
    "mqar-512": _mqar(512, 64, 128),
    "mqar-mix": Standard(
        "mqar-mix", "Based, arXiv:2402.18668, figure 2, and Zoology's repository", 256,
        (1e-3, 3.16e-3, 1e-2, 3.16e-2), epochs=32, layers=2, examples=180_000,
    ),
    "mad-recall": _mad("recall"),
    "mad-noisy-recall": _mad("noisy-recall"),
    "mad-fuzzy-recall": _mad("fuzzy-recall"),
    "mad-selective-copying": _mad("selective-copying"),
    "mad-compression": _mad("compression"),
    "mad-memorization": _mad("memorization", train_examples=256),
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
        "masked-text", "LION (NeurIPS 2025) after M2-BERT base", 4096, (8e-4,), (of_rate(1e-5, 8e-4),), steps=70_000,
        warmup=0.06, lr_schedule="linear", floor=0.02, layers=12, width=(768,), heads=12, betas=(0.9, 0.98), eps=1e-6,
        settings={"length": 128, "share": 0.3, "test_share": 0.15},
    ),
    **{name: Standard(**fields) for name, fields in (GLUE | PUBLISHED).items()},
})  # fmt: skip


def standard(name: str) -> Standard:
    """Look up a published setting by name.

    Example:
        >>> standard("mqar-64").settings["pairs"], standard("mqar-64").learning_rates
        (4, (0.0001, 0.000464, 0.00215, 0.01))
    """
    check_option("standard", name, STANDARDS)
    return STANDARDS[name]
