"""Stage 2: low-rank adapters let the projections adjust to the converted attention around them.

The teacher is the same model with softmax in place of the cores and the adapters switched off.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from linattn.convert.convert import linearized_layers, set_mode
from linattn.convert.training.loop import Batch, Batches, StageOptions, StageRun, call, in_fp32, in_stage
from linattn.convert.transfer import real_mean, wide
from linattn.support.checkpoint import model_digest
from linattn.support.config import option
from linattn.support.extras import need
from linattn.support.options import OptionError
from linattn.support.progress import Report

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

IGNORED = -100
MOST_LOGITS = 2**27  # logits converted to fp32 at once: 512 MiB
DIGESTED = 1024  # numbers of each tensor that identify a model


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(StageOptions):
    """Options for training the low-rank adapters.

    ``objective``: ``"distill"`` matches the teacher's distribution over tokens (for an encoder without a head, its last
    hidden states), ``"next_token"`` predicts the text itself.

    Example:
        >>> FinetuneOptions(rank=0)
        Traceback (most recent call last):
        linattn.support.options.OptionError: rank: must be at least 1, got 0
    """

    steps: int = option(100, "Training steps.", least=1)
    lr: float = option(
        5e-4, "Highest learning rate; it rises for a twentieth of the steps, then falls to a hundredth of it.", above=0
    )
    rank: int = option(8, "Rank of the adapters.", least=1)
    alpha: float = option(16.0, "The adapters' output is scaled by alpha / rank.", above=0)
    targets: tuple[str, ...] | None = option(
        None, "Names of the projections that get adapters.", default_text="those of the attention"
    )
    objective: Literal["distill", "next_token"] = option(
        "distill", "Match the teacher's answers, or predict the text itself."
    )
    pooled_weight: float = option(
        1.0, "For an encoder without a head: weight of the mean over tokens in distill, beside each token.", least=0
    )
    hidden_weight: float = option(
        0.0, "Weight of the hidden states after every layer, distilled beside the teacher's answer.", least=0
    )
    train_cores: bool = option(False, "Also train what stage 1 has trained, its scales faster by scale_factor.")

    def check(self) -> None:
        if self.targets == ():
            raise OptionError("targets", "must be names in a tuple, or None, got ()")
        if self.hidden_weight and self.objective == "next_token":
            raise OptionError("hidden_weight", "needs a teacher: objective must be distill, got next_token")


def finetune(
    model: nn.Module,
    batches: Batches,
    options: FinetuneOptions | None = None,
    folder: Path | None = None,
    *,
    progress: Report | None = None,
    accelerator: "Accelerator | None" = None,
) -> list[float]:
    """Train adapters on a converted model and merge them, which leaves a plain converted model with new weights.

    If it is interrupted, the adapters are removed and the model is what it was before. A run that was stopped and
    started again, from the same model, ends in the same weights.

    Args and exceptions are those of ``linattn.convert.transfer.transfer``. Returns the loss of each step.
    """
    need("fine-tuning", "peft")
    options = options or FinetuneOptions()
    identity = {"model": model_digest(model), "weights": weights_digest(model)}
    with in_stage(model), adapted_model(model, options) as adapted:
        run = _Finetuning(adapted, options, batches=batches, folder=folder, progress=progress, accelerator=accelerator)
        losses: list[float] = run.go(identity)["losses"]
    return losses


class Adapted:
    """A converted model with adapters in its projections, which can also run as the teacher that it was."""

    def __init__(self, model: nn.Module, options: FinetuneOptions) -> None:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        names = target_names(model, options.targets)
        config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=names, lora_dropout=0.0)  # type: ignore[arg-type]
        self.model = model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)  # for one factor of each adapter; the other starts at 0
            self.peft: Any = get_peft_model(model, config)
        self._adapters: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in linearized_layers(model).values() if options.train_cores else ():
            in_fp32(layer.core).requires_grad_(True)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def answer_as(self, mode: Literal["teacher", "student"], batch: Batch, **options: Any) -> Any:
        """The model's output; of the teacher, without gradients."""
        # Layer by layer: peft's own way searches the whole model first, which takes longer than a layer's pass.
        set_mode(self.model, mode)
        for adapter in self._adapters:
            adapter.enable_adapters(mode == "student")
        with torch.set_grad_enabled(torch.is_grad_enabled() and mode == "student"):
            return call(self.model, batch, **options)


@contextmanager
def adapted_model(model: nn.Module, options: FinetuneOptions) -> Iterator[Adapted]:
    """The model with adapters. On exit these are merged; after an error the model is as before."""
    cores = [layer.core for layer in linearized_layers(model).values()]
    before = [{name: value.detach().clone() for name, value in core.state_dict().items()} for core in cores]
    adapted = Adapted(model, options)
    try:
        yield adapted
    except BaseException:
        adapted.peft.unload()
        for core, weights in zip(cores, before, strict=True):
            core.load_state_dict(weights)
        raise
    finally:
        set_mode(model, "student")
    adapted.peft.merge_and_unload()


def target_names(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Dotted paths of the projections that get adapters; the maps inside a core never do.

    ``targets`` are last parts of the names of projections, anywhere in the model; None: those of the converted
    attention.
    """
    layers = linearized_layers(model)
    inside = tuple(f"{name}." for name, module in model.named_modules() if module in layers.values())
    last = next(iter(layers.values())).adapter.projections if targets is None else targets
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last and ".core." not in name]
    return [name for name in names if targets is not None or name.startswith(inside)]


class _Finetuning(StageRun):
    """The loop of this stage; all adapters together are one part."""

    number = 1
    options: FinetuneOptions

    def __init__(self, adapted: Adapted, options: FinetuneOptions, **more: Any) -> None:
        self.adapted = adapted
        parts = {"adapters": nn.ParameterList(adapted.parameters().values())}
        super().__init__(adapted.model, parts, options, **more)

    def step(self) -> Tensor:
        loss = self._loss(self.batch())
        loss.backward()
        self.update("adapters")
        return loss.detach()[None]

    def _loss(self, batch: Batch) -> Tensor:
        options, mask = self.options, batch.get("attention_mask")
        if options.objective == "next_token":
            return next_token_loss(self.adapted.answer_as("student", batch).logits, batch["input_ids"], mask)
        more = {"output_hidden_states": True} if options.hidden_weight else {}
        taught, output = (self.adapted.answer_as(mode, batch, **more) for mode in ("teacher", "student"))
        (student, is_logits), (teacher, _) = answer_of(output), answer_of(taught)
        if is_logits:
            loss = answer_divergence(student, teacher, mask)
        else:
            loss = hidden_distance(student, teacher, mask, options.pooled_weight)
        if more:  # the first hidden states are the embeddings, which student and teacher share
            pairs = zip(output.hidden_states[1:], taught.hidden_states[1:], strict=True)
            squares = [relative_squares(*pair, mask) for pair in pairs]
            loss = loss + options.hidden_weight * torch.stack(squares).mean()
        return loss

    def words(self, losses: Sequence[float]) -> str:
        return f"loss {losses[0]:.4f}"

    def result(self) -> dict[str, Any]:
        return {"losses": [row[0] for row in self.losses()]}


def weights_digest(model: nn.Module) -> str:
    """Identify a model by the first numbers of each tensor: from another start a run would end elsewhere."""
    digest = blake2b(digest_size=8)
    for name, value in model.state_dict().items():
        numbers = value.detach().flatten()[:DIGESTED].cpu()
        digest.update(name.encode() + numbers.double().numpy().tobytes())
    return digest.hexdigest()


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Loss of each real token after the first, in nats: the mean over these tokens."""
    targets = ids[:, 1:] if mask is None else ids[:, 1:].masked_fill(~mask[:, 1:].bool(), IGNORED)
    return F.cross_entropy(wide(logits[:, :-1].flatten(0, 1)), targets.flatten(), ignore_index=IGNORED)


def answer_divergence(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """``KL(teacher | student)`` of logits ``(..., classes)``, mean over real tokens or pictures.

    Only the student gets a gradient.
    """
    rows: Tensor = _Divergence.apply(student.flatten(0, -2), teacher.flatten(0, -2))
    return real_mean(rows.view(student.shape[:-1]), mask)


class _Divergence(torch.autograd.Function):
    """``sum_c p_c (log p_c - log q_c)`` of each row of logits ``(N, C)``; the gradient of the student's is ``q - p``.

    Rows and their gradients are computed in parts: in fp32 all logits of a batch, and what is derived from them, would
    take many times the memory of the model.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        rows, size = [], max(1, MOST_LOGITS // student.shape[-1])
        for first in range(0, len(student), size):
            part = slice(first, first + size)
            log_q, log_p = (wide(x[part]).log_softmax(-1) for x in (student, teacher))
            p = log_p.exp()
            rows.append(log_p.sub_(log_q).mul_(p).sum(-1))
            if gradient is not None:
                gradient[part] = log_q.exp_().sub_(p)
        ctx.save_for_backward(gradient)
        return torch.cat(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        # Factors stay in fp32, and each product is rounded once.
        return torch.mul(gradient, d_rows.unsqueeze(-1), out=torch.empty_like(gradient)), None


def hidden_distance(student: Tensor, teacher: Tensor, mask: Tensor | None, pooled_weight: float = 1.0) -> Tensor:
    """Of hidden states ``(B, T, C)``: :func:`relative_squares`, and 1 - cosine of their means, ``pooled_weight`` times.

    The mean over tokens is what sentences are compared by.
    """
    squares = relative_squares(student, teacher, mask)
    cosine = F.cosine_similarity(pooled(wide(student), mask), pooled(wide(teacher), mask), dim=-1)
    return squares + pooled_weight * (1 - cosine).mean()


def pooled(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over real tokens, ``(B, T, C) -> (B, C)``."""
    real = hidden.new_ones(hidden.shape[:2]) if mask is None else mask.to(hidden)
    return (hidden * (real / real.sum(1, keepdim=True))[..., None]).sum(1)


def relative_squares(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """``|student - teacher|^2 / |teacher|^2`` of hidden states ``(B, T, C)``, mean over real tokens."""
    student, teacher = wide(student), wide(teacher)
    return real_mean((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-12), mask)


def answer_of(output: Any) -> tuple[Tensor, bool]:
    """The logits of a model's output and True or, without logits, its last hidden states and False."""
    if isinstance(output, Tensor):
        return output, True
    logits = getattr(output, "logits", None)
    return (output.last_hidden_state, False) if logits is None else (logits, True)
