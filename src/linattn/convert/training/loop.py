"""The loop of a stage. Each step depends only on the weights and its number, so a killed run can be resumed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from linattn.convert.training.readings import Readings
from linattn.convert.training.setting import Setting, StageOptions, is_main
from linattn.ops.shared.call import compute_dtype
from linattn.support.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

BETAS = (0.9, 0.99)
DIGESTED = 1024  # numbers of each tensor that identify a model


def groups_with_scales(named: Iterable[tuple[str, nn.Parameter]], factor: float) -> list[dict[str, Any]]:
    """Group parameters by the ``factor`` of their learning rate: scales learned as logarithms have their own."""
    found: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named:
        found.setdefault(factor if name.rpartition(".")[2].startswith("log_") else 1.0, []).append(parameter)
    return [{"params": found[own], "factor": own} for own in sorted(found, key=lambda own: own != 1.0)]


class StageRun(ABC):
    """Base of a stage's training loop: parts with an optimiser each, and the number of steps done.

    Args:
        parts: modules to train, by name, each with a gradient norm and an optimiser of its own; parts without
            parameters are only measured.
        number: number of the stage; it separates the random numbers of the two stages.
    """

    def __init__(self, parts: Mapping[str, nn.Module], options: StageOptions, setting: Setting, number: int) -> None:
        self.options, self.setting, self.number = options, setting, number
        self.parts = nn.ModuleDict(parts)
        # One kernel for all weights of a part: parts are small and many.
        fused = True if setting.device.type == "cuda" else None
        self.optimizers = {
            name: AdamW(groups, lr=options.lr, betas=BETAS, weight_decay=0.0, fused=fused)
            for name, part in parts.items()
            if (groups := self.groups(part))
        }
        self.steps = options.steps_of(options.length) if self.optimizers else 0
        self.readings = Readings(parts)
        self.done = 0

    def groups(self, part: nn.Module) -> list[dict[str, Any]]:
        """Groups of a part's parameters, each with the ``factor`` of its learning rate."""
        parameters = list(part.parameters())
        return [{"params": parameters, "factor": 1.0}] if parameters else []

    @abstractmethod
    def step(self) -> Tensor:
        """Update all parts once; returns the loss of each, ``(parts,)``, on the device."""

    @abstractmethod
    def words(self, losses: Sequence[float]) -> str:
        """Say in words how the training goes."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The outcome that is written when all steps are done, ready for JSON."""

    def begin(self) -> None:  # noqa: B027, most have nothing to do
        """Called before the first step, but not when a stopped run is resumed."""

    def memory(self) -> dict[str, Any]:
        """What else the result depends on, for checkpoints."""
        return {}

    def remember(self, memory: dict[str, Any]) -> None:  # noqa: B027
        """Restore what :meth:`memory` returned."""

    def go(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Run all steps, or those that are left; ``identity`` tells this run from others."""
        fingerprint = self._fingerprint(identity)
        files = self.setting.files
        finished = None if files is None else files.load_result(fingerprint)
        if files is not None and finished is not None:
            self.parts.load_state_dict(files.load_weights())
            return finished
        if not self._resume(fingerprint):
            self.begin()
        while self.done < self.steps:
            self._one_step()
            if self.done % self.options.checkpoint_steps == 0 and self.done < self.steps:
                self._save(fingerprint)
        self.readings.rows()  # raises if one of the last losses is not finite
        result = self.result()
        if files is not None and is_main(self.setting.accelerator):
            files.save_result(self.parts, result, fingerprint)
        if self.setting.accelerator is not None:
            self.setting.accelerator.wait_for_everyone()
        return result

    def update(self, name: str) -> None:
        """Take one step of a part's optimiser with the present gradients, then drop these."""
        parameters = list(self.parts[name].parameters())
        average_gradients(parameters, self.setting.accelerator)
        if self.options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.options.clip_norm)
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()

    def _one_step(self) -> None:
        seed_step(self.options.seed, self.number, self.done)
        rate = self.options.rate(self.done, self.steps)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
        self.readings.add(self.step())
        self.done += 1
        newest = self.readings.look()
        if newest is not None and self.setting.progress is not None:
            self.setting.progress(self.done, self.steps, self.words(newest))

    def _fingerprint(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        batches: dict[str, Any] = getattr(self.setting.batches, "fingerprint", dict)()
        return self.options.fingerprint() | {**identity, "batches": batches, "processes": self.setting.processes}

    def _save(self, fingerprint: dict[str, Any]) -> None:
        rows = self.readings.rows()  # raises before a broken state could replace a good one
        if self.setting.files is None or not is_main(self.setting.accelerator):
            return
        state = {
            "fingerprint": fingerprint, "done": self.done, "rows": rows, "memory": self.memory(),
            "parts": self.parts.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }  # fmt: skip
        self.setting.files.save_checkpoint(state)

    def _resume(self, fingerprint: dict[str, Any]) -> bool:
        files = self.setting.files
        state = None if files is None else files.load_checkpoint(fingerprint)
        if files is None or state is None:
            return False
        if is_main(self.setting.accelerator):
            files.remove_halves()
        self.done = state["done"]
        self.readings = Readings(self.readings.what, state["rows"])
        self.remember(state["memory"])
        self.parts.load_state_dict(state["parts"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        return True


def average_gradients(parameters: Sequence[nn.Parameter], accelerator: "Accelerator | None") -> None:
    """Average the gradients of all processes in one message; each process saw equally many rows."""
    if accelerator is None or accelerator.num_processes == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dtype = compute_dtype(*gradients)
    mean = accelerator.reduce(torch.cat([gradient.flatten().to(dtype) for gradient in gradients]), "mean")
    for gradient, part in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def weights_digest(model: nn.Module) -> str:
    """Identify a model by the first numbers of each tensor: from another start a run would end elsewhere."""
    digest = blake2b(digest_size=8)
    for name, value in model.state_dict().items():
        numbers = value.detach().flatten()[:DIGESTED].cpu()
        digest.update(name.encode() + numbers.double().numpy().tobytes())
    return digest.hexdigest()
