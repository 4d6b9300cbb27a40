"""Settings for fine-tuning on the tasks of GLUE, as fields of ``Standard``, by name.

``glue-rte`` is for the base model of the recipe ``masked-text``, ``glue-large-rte`` for one of 24 layers. Names without
a task have the numbers of MNLI, the largest. Files do not tell which task they are of, so name the recipe of the task.
RTE, MRPC and STS-B start from a model that was tuned on MNLI.

The weight decay of the source is the share of the weights that a step at the highest learning rate subtracts, whatever
that rate is (``DecoupledAdamW``). PyTorch's AdamW subtracts the rate times the decay; :func:`of_rate` converts between
them.
"""

from typing import Any

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
PLAIN = ("cola", "large-rte")  # trained with PyTorch's AdamW in the source too


def of_rate(decay: float, lr: float) -> float:
    """The weight decay with which PyTorch's AdamW subtracts a share ``decay`` per step at the rate ``lr``.

    Example:
        >>> round(of_rate(1e-5, 8e-4), 6)
        0.0125
    """
    return decay / lr


def _glue(task: str) -> dict[str, dict[str, Any]]:
    batch, epochs, lr, decay, large_epochs, large_decay = TABLE[task]
    shared: dict[str, Any] = {
        "task": "stsb" if task == "stsb" else "glue", "batch_size": batch, "warmup": 0.06, "lr_schedule": "linear",
        "betas": (0.9, 0.98), "eps": 1e-6, "settings": {"length": 128},
    }  # fmt: skip
    if task not in PLAIN:
        decay = of_rate(decay, lr)
    if f"large-{task}" not in PLAIN:
        large_decay = of_rate(large_decay, LARGE_RATE)
    base = {"source": BASE, "learning_rates": (lr,), "weight_decays": (decay,), "epochs": epochs,
            "layers": 12, "width": (768,), "heads": 12}  # fmt: skip
    large = {"source": LARGE, "learning_rates": (LARGE_RATE,), "weight_decays": (large_decay,),
             "epochs": large_epochs, "layers": 24, "width": (1024,), "heads": 16}  # fmt: skip
    return {f"glue-{task}": shared | base, f"glue-large-{task}": shared | large}


_BY_TASK: dict[str, dict[str, Any]] = {name: fields for task in TABLE for name, fields in _glue(task).items()}
GLUE: dict[str, dict[str, Any]] = {
    "glue": _BY_TASK["glue-mnli"],
    "glue-large": _BY_TASK["glue-large-mnli"],
    **{name: fields for name, fields in _BY_TASK.items() if not name.endswith("mnli")},
}
