"""Tasks, hosts and training at three scales: minutes on a CPU, minutes on a GPU, and the paper's."""

from dataclasses import dataclass, field
from typing import Any

from linattn.lab.train.text.recipes import host_of_recipe
from linattn.support.options import check_option

SCALES = ("cpu", "gpu", "paper")
CPU_HOST = {"size": "small", "depth": 2, "heads": 2}
GPU_HOST = {"size": "small", "depth": 4, "heads": 2}
# Small models in short runs take higher learning rates than the paper's, and a longer share of the run to warm up. In
# all else they are trained alike, whatever the task's recipe says.
SMALL_TRAIN: dict[str, Any] = {"betas": (0.9, 0.98), "weight_decay": 0.03, "eps": 1e-8, "schedule": "cosine"}
WARMUP = 0.05


@dataclass(frozen=True)
class Budget:
    """The budget of a task at one scale.

    Attributes:
        settings: settings of the task.
        train: fields of ``TextConfig`` that differ from those of the task's recipe.
        host: fields of ``HostOptions``.
        widths: widths of the hosts.
        lrs: learning rates that are tried for all models alike.
        metrics: metrics shown in the table; models are compared by the first.
        recipe: the recipe whose settings hold where nothing else is given.
    """

    settings: dict[str, Any]
    train: dict[str, Any]
    metrics: tuple[str, ...]
    host: dict[str, Any] = field(default_factory=lambda: dict(GPU_HOST))
    widths: tuple[int, ...] = (64, 128)
    lrs: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    recipe: str = ""

    def training(self, given: dict[str, Any]) -> dict[str, Any]:
        """``train`` with what is ``given``; small scales warm up for a share of the steps unless a warm-up is given.

        Example:
            >>> budget("depo", "gpu").training({"steps": 400})["warmup_steps"]
            20
        """
        found = self.train | given
        if "steps" in self.train:
            found.setdefault("warmup_steps", round(WARMUP * found["steps"]))
        return found


CPU: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "depo": (
        {"letters": 12, "word_length": (1, 1), "nodes": 5, "hops": 2, "length": 64, "test_examples": 64},
        {"steps": 300, "batch_size": 16},
    ),
    "brevo": ({"nodes": 4, "length": 64, "test_examples": 64}, {"steps": 300, "batch_size": 16}),
    "capo": ({"people": 100, "length": 94, "test_examples": 50}, {"steps": 200, "batch_size": 16}),
    "mano": ({"operations": 1, "modulus": 5, "length": 64, "test_examples": 64}, {"steps": 300, "batch_size": 16}),
    "lano": ({"root": 12, "length": 64, "test_examples": 64}, {"steps": 300, "batch_size": 16}),
}
# Small enough that a host of width 64 learns them in about a thousand steps, large enough that not every host does.
GPU: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "depo": (
        {"letters": 16, "word_length": (1, 1), "nodes": 8, "hops": 4, "length": 128, "test_examples": 512},
        {"steps": 1200, "batch_size": 64},
    ),
    "brevo": ({"nodes": 7, "length": 128, "test_examples": 512}, {"steps": 1200, "batch_size": 64}),
    "capo": ({"people": 10_000, "length": 256, "test_examples": 512}, {"steps": 3000, "batch_size": 64}),
    "mano": ({"operations": 3, "modulus": 5, "length": 128, "test_examples": 512}, {"steps": 1200, "batch_size": 64}),
    "lano": ({"root": 19, "length": 256, "test_examples": 128}, {"steps": 3000, "batch_size": 128}),
}
PAPER = {"depo": "depo1-225", "brevo": "brevo1-70", "capo": "capo-50k", "mano": "mano-10", "lano": "lano-f"}
METRICS = {
    "depo": ("accuracy",),  # and those of two numbers of hops, which depend on the settings
    "brevo": ("exact_match", "legal"),
    "capo": ("bits", "share"),
    "mano": ("accuracy",),
    "lano": ("kl", "legal"),
}
LAB_TASKS = tuple(METRICS)


def budget(task: str, scale: str) -> Budget:
    """
    Example:
        >>> budget("depo", "gpu").settings["nodes"], budget("depo", "paper").recipe
        (8, 'depo1-225')
        >>> budget("capo", "paper").host
        {'size': 'base', 'depth': 8, 'head_dim': 64, 'tied': True}
    """
    check_option("task", task, LAB_TASKS)
    check_option("scale", scale, SCALES)
    metrics = METRICS[task]
    if scale == "paper":
        host = {name: value for name, value in host_of_recipe(PAPER[task]).items() if name != "width"}
        return Budget({}, {}, metrics, {"size": "base"} | host, (512, 768), (), PAPER[task])
    if scale == "cpu":
        settings, train = CPU[task]
        return Budget(settings, {**train, **SMALL_TRAIN}, metrics, CPU_HOST, (64,), (3e-3,))
    settings, train = GPU[task]
    return Budget(settings, {**train, **SMALL_TRAIN}, metrics)


def shown_metrics(task: Any, chosen: Budget) -> tuple[str, ...]:
    """The metrics of the budget; for Depo also the accuracies at K and K/2 hops, as in the paper's table.

    Example:
        >>> from linattn.lab.tasks.text import text_task
        >>> shown_metrics(text_task("depo", hops=8), budget("depo", "gpu"))
        ('accuracy', 'accuracy_8', 'accuracy_4')
    """
    hops = getattr(task, "tested_hops", None)
    return chosen.metrics if hops is None else (*chosen.metrics, *(f"accuracy_{k}" for k in hops[-1:-3:-1]))
