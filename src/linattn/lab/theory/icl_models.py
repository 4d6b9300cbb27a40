"""One-layer models, many at a time: a *stack* holds M independent ones along its first axis. Their training and risk.

Tokens are ``z_i = (x_i, y_i)``, the last one ``(x, 0)``: ``(M, B, T, d+1)`` for B tasks of each model. A model returns
one number per task, its answer at the last token. Shorter tasks have zeros in front, as a zero token adds nothing in
any of these models.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import cos, pi
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from linattn.lab.theory.icl_tasks import Curve
from linattn.ops.convolution.api import short_convolution, short_convolution_step
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.linear.api import linear_attention

OPEN_GATE = 3.0  # sigmoid(3) = 0.95: at first the last examples count nearly alike
CANON_WIDTH = 4
# These rows are tens of tokens long and one value wide: too small for kernels that are made for long sequences.
IMPL = "chunked"
WARM_UP = 0.05  # share of all steps


def draw(shape: tuple[int, ...], width: int, generator: Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator, device=generator.device) / width**0.5)


def near_label(shape: tuple[int, ...], generator: Generator) -> nn.Parameter:
    """Values ``(M, d+1, ...)`` that start near the label alone: from a random direction some models never find it."""
    values = 0.2 * draw(shape, shape[1], generator).detach()
    values[:, -1] += 1
    return nn.Parameter(values)


def project(tokens: Tensor, weight: Tensor) -> Tensor:
    """Multiply by each model's own matrix: ``(M, B, T, C)`` and ``(M, C, K)`` to ``(M, B, T, K)``."""
    M, B, T, _ = tokens.shape
    return torch.bmm(tokens.flatten(1, 2), weight).view(M, B, T, -1)


class LinearStack(nn.Module):
    """``f = sum_i (z^T Wq Wk^T z_i) (z_i^T v)``, z the last token: linear attention without a denominator.

    Wq, Wk ``(M, d+1, r)``; v ``(M, d+1)`` stands for the values' projection and the read-out, of which only the product
    matters. ``ranks`` gives each model its r; columns beyond it are zero in both factors, so no gradient changes them.
    """

    def __init__(self, models: int, width: int, generator: Generator, ranks: list[int] | None = None) -> None:
        super().__init__()
        columns = width if ranks is None else max(ranks)
        self.query, self.key = (draw((models, width, columns), width, generator) for _ in range(2))
        self.value = near_label((models, width), generator)
        if ranks is not None:
            allowed = (torch.arange(columns) < torch.tensor(ranks)[:, None, None]).to(generator.device)
            self.query.data.mul_(allowed)
            self.key.data.mul_(allowed)

    def features(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``(M, B, 1, r)`` of the last token, k ``(M, B, T, r)``, v ``(M, B, T, 1)``."""
        q = project(tokens[:, :, -1:], self.query)
        return q, project(tokens, self.key), project(tokens, self.value.unsqueeze(-1))

    def forward(self, tokens: Tensor) -> Tensor:
        return linear_attention(*self.features(tokens), normalizer=None, impl=IMPL).flatten(1)


class AdaptedStack(LinearStack):
    """A frozen trained stack, plus ``U D^T`` of low rank added to ``Wq Wk^T``: LoRA."""

    def __init__(self, base: LinearStack, width: int, generator: Generator, ranks: list[int]) -> None:
        super().__init__(len(ranks), width, generator, ranks)
        self.base = base.requires_grad_(False)
        self.value.requires_grad_(False)
        self.query.data.zero_()  # at the start nothing is added

    def features(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, v), (up, down, _) = self.base.features(tokens), super().features(tokens)
        return torch.cat([q, up], dim=-1), torch.cat([k, down], dim=-1), v


class H3Stack(nn.Module):
    """``f = sum_c q_c (filter * (k_c v_c))``: a gated long convolution, with one filter over the T tokens per model.

    q, k, v are projections of the tokens with d+1 channels, q that of the last one; the read-out is part of q. The
    filter's taps weight the examples, which linear attention cannot do.
    """

    def __init__(self, models: int, width: int, generator: Generator, tokens: int) -> None:
        super().__init__()
        self.query, self.key = (draw((models, width, width), width, generator) for _ in range(2))
        self.value = near_label((models, width, width), generator)
        self.filter = nn.Parameter(1 + 0.2 * draw((models, tokens), 1, generator).detach())

    def forward(self, tokens: Tensor) -> Tensor:
        M, B, _, C = tokens.shape
        q = project(tokens[:, :, -1:], self.query).squeeze(2)
        product = project(tokens, self.key) * project(tokens, self.value)
        product = product.permute(1, 2, 0, 3).flatten(2)  # (B, T, M C): models are channels to the convolution
        taps = self.filter.repeat_interleave(C, dim=0)
        # Only the last token's output is needed: one step after the others gives it.
        summed = short_convolution_step(product[:, -1], taps, None, ConvolutionState(product[:, :-1])).output
        return (q * summed.view(B, M, C).transpose(0, 1)).sum(-1)


class GatedStack(LinearStack):
    """Linear attention whose state decays by ``sigmoid(g^T z_t + b)`` at every token."""

    def __init__(self, models: int, width: int, generator: Generator) -> None:
        super().__init__(models, width, generator)
        self.gate = nn.Parameter(torch.zeros(models, width, device=generator.device))
        self.bias = nn.Parameter(torch.full((models, 1, 1), OPEN_GATE, device=generator.device))

    def forward(self, tokens: Tensor) -> Tensor:
        _, k, v = self.features(tokens)
        log_decay = F.logsigmoid(project(tokens, self.gate.unsqueeze(-1)).squeeze(-1) + self.bias)
        q = project(tokens, self.query)
        output = linear_attention(q, k, v, causal=True, log_decay=log_decay, normalizer=None, impl=IMPL)
        return output[:, :, -1, 0]


class CanonStack(LinearStack):
    """A Canon layer, ``z'_t = z_t + sum_w c_w * z_{t-w}`` over four tokens, followed by linear attention."""

    def __init__(self, models: int, width: int, generator: Generator) -> None:
        super().__init__(models, width, generator)
        drawn = torch.rand(models * width, CANON_WIDTH, generator=generator, device=generator.device)
        self.taps = nn.Parameter((drawn - 0.5) * 2 * CANON_WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        M, B, T, C = tokens.shape
        rows = tokens.permute(1, 2, 0, 3).reshape(B, T, M * C)
        mixed = short_convolution(rows, self.taps, residual=True, impl=IMPL)
        return super().forward(mixed.view(B, T, M, C).permute(2, 0, 1, 3))


STACKS: dict[str, Callable[..., nn.Module]] = {
    "linear": LinearStack, "h3": H3Stack, "gated": GatedStack, "canon": CanonStack
}  # fmt: skip


class Cell(NamedTuple):
    """One model of a stack: a curve, a number of examples, and which of several equal runs this is."""

    curve: Curve
    n: int
    seed: int


class TaskStream:
    """Fresh tasks for the cells, in their order; all cells of a curve must be adjacent.

    Tasks with fewer examples than the largest number have zeros in front. With ``sources`` tasks come from the data
    that a curve was trained on before.
    """

    def __init__(self, cells: Sequence[Cell], generator: Generator, *, sources: bool = False) -> None:
        self.cells, self.generator = cells, generator
        self.most, self.width = max(cell.n for cell in cells), cells[0].curve.data.d + 1
        data = [(sources and cell.curve.source) or cell.curve.data for cell in cells]
        self.groups = [list(equal) for _, equal in groupby(data, key=id)]
        self.counts = torch.tensor([cell.n for cell in cells], device=generator.device)
        place = torch.arange(self.most + 1, device=generator.device)
        self.real = (place >= self.most - self.counts.unsqueeze(1)).unsqueeze(1).float()  # (M, 1, T)

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Tokens ``(M, B, T, d+1)`` and answers ``(M, B)``; labels are in units of their standard deviation."""
        drawn = [(data.sample((1 + len(more), batch), self.most, self.generator), data.power**-0.5)
                 for data, *more in self.groups]  # fmt: skip
        x = torch.cat([x for (x, _), _ in drawn]) * self.real.unsqueeze(-1)
        y = torch.cat([y * unit for (_, y), unit in drawn]) * self.real
        return torch.cat([x, F.pad(y[..., :-1], (0, 1)).unsqueeze(-1)], -1), y[..., -1]


def fit(
    stack: nn.Module, stream: TaskStream, steps: int, batch: int, lr: float,
    tell: Callable[[float], None] = lambda share: None,
) -> None:  # fmt: skip
    """``steps`` of ``batch`` tasks per model; the learning rate rises, then falls as a cosine to 0."""
    rise = max(round(WARM_UP * steps), 1)

    def rate(step: int) -> float:
        return (step + 1) / rise if step < rise else 0.5 * (1 + cos(pi * (step - rise) / max(steps - rise, 1)))

    parameters = [p for p in stack.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(steps):
        tokens, answers = stream.draw(batch)
        # A sum over models: each model's gradient is that of its own loss.
        loss = (predict(stack, tokens, stream.counts) - answers).square().mean(1).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        tell((step + 1) / steps)


def predict(stack: nn.Module, tokens: Tensor, counts: Tensor) -> Tensor:
    """Answers ``(M, B)``: the model's sum over examples, divided by their number, so that weights are of order 1."""
    answers: Tensor = stack(tokens) / counts.unsqueeze(1)
    return answers


@torch.no_grad()
def measure_risks(stack: nn.Module, stream: TaskStream, tasks: int, batch: int) -> tuple[list[float], list[float]]:
    """Risks of the models over the same test tasks, and their standard errors, in units of the labels' variance."""
    sums = torch.zeros(2, len(stream.cells), dtype=torch.float64, device=stream.counts.device)
    for done in range(0, tasks, batch):
        tokens, answers = stream.draw(min(batch, tasks - done))
        errors = (predict(stack, tokens, stream.counts) - answers).double().square()
        sums += torch.stack([errors, errors.square()]).sum(2)
    mean, square = sums / tasks
    return mean.tolist(), ((square - mean**2).clamp(min=0) / tasks).sqrt().tolist()
