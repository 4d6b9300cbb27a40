"""The config of training language models."""

from dataclasses import asdict, dataclass
from typing import Any, get_args

from linattn.lab.train.config import Precision
from linattn.support.checks import check_graphs, check_integer, check_number
from linattn.support.options import OptionError, check_device, check_option
from linattn.support.schedule import Schedule

# Fields without effect on the weights: a run may be resumed with other values.
_WITHOUT_EFFECT = ("checkpoint_seconds", "graphs")
# Fields unknown to runs of earlier versions, with the values these had, which are left out so that they can resume.
AS_EVER = {"schedule": "cosine", "eps": 1e-8}


@dataclass(frozen=True)
class TextConfig:
    """How to train a language model; the same config and seed on the same kind of device give the same weights.

    Example:
        >>> TextConfig(steps=100, warmup_steps=10).check()
        >>> TextConfig(steps=100, warmup_steps=200).check()
        Traceback (most recent call last):
        linattn.support.options.OptionError: warmup_steps: must not exceed steps = 100, got 200
    """

    steps: int = 1000
    """Number of updates of the weights."""
    batch_size: int = 32
    """Sequences of one step, over all processes together."""
    accumulation: int = 1
    """Number of parts in which the sequences of a step are computed, one after another; saves memory."""
    lr: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: float = 1e-5
    """Learning rate of the last step."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises linearly."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up."""
    weight_decay: float = 0.1
    """Weight decay of matrices; embeddings, norms, biases and a mechanism's own parameters do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    """Added to the denominator of AdamW's step."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient of all parameters; larger ones are clipped to it. None: no clipping."""
    eval_every: int = 0
    """Steps between two evaluations; 0: only one at the end."""
    eval_batch_size: int | None = None
    """Sequences evaluated at a time; None: as many as are computed at a time in training."""
    precision: Precision = "fp32"
    """``bf16`` computes in autocast; weights and optimiser stay fp32."""
    compile: bool = False
    graphs: bool | None = False
    """Replay steps as CUDA graphs, which saves the host most of its work; None: where a GPU makes it possible."""
    seed: int = 0
    device: str = "cpu"
    checkpoint_seconds: float = 300.0
    """Longest time between two checkpoints; each evaluation ends in one anyway."""

    @property
    def round_steps(self) -> int:
        """Steps from one evaluation to the next."""
        return min(self.eval_every, self.steps) or self.steps

    @property
    def rounds(self) -> int:
        return -(-self.steps // self.round_steps)

    def check(self) -> None:
        """Raise ``OptionError`` for the first field that makes no sense, before any work is done."""
        for name in ("steps", "batch_size", "accumulation"):
            check_integer(name, getattr(self, name), 1)
        for name in ("warmup_steps", "eval_every", "seed"):
            check_integer(name, getattr(self, name), 0)
        if self.eval_batch_size is not None:
            check_integer("eval_batch_size", self.eval_batch_size, 1)
        if self.batch_size % self.accumulation:
            raise OptionError("accumulation", f"must divide batch_size = {self.batch_size}, got {self.accumulation}")
        check_number("lr", self.lr, above=0)
        check_number("min_lr", self.min_lr, least=0)
        if self.min_lr > self.lr:
            raise OptionError("min_lr", f"must not exceed lr = {self.lr:g}, got {self.min_lr:g}")
        if self.warmup_steps > self.steps:
            raise OptionError("warmup_steps", f"must not exceed steps = {self.steps}, got {self.warmup_steps}")
        check_option("schedule", self.schedule, get_args(Schedule))
        check_number("weight_decay", self.weight_decay, least=0)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise OptionError("betas", f"must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta, least=0, below=1)
        check_number("eps", self.eps, above=0)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, above=0)
        check_option("precision", self.precision, get_args(Precision))
        check_number("checkpoint_seconds", self.checkpoint_seconds, above=0)
        check_device(self.device)
        check_graphs(self.graphs, self.device)

    def fingerprint(self) -> dict[str, Any]:
        """What a run must have in common with the one it resumes; of the device only the kind counts."""
        fields = {
            name: value
            for name, value in asdict(self).items()
            if name not in _WITHOUT_EFFECT and not (name in AS_EVER and value == AS_EVER[name])
        }
        return {**fields, "betas": list(self.betas), "device": self.device.split(":")[0]}
