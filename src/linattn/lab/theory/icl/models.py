"""One-layer models, many at a time: a *stack* holds M independent ones along its first axis.

Tokens are ``z_i = (x_i, y_i)``, the last one ``(x, 0)``: ``(M, B, T, d+1)`` for B tasks of each model. A model returns
one number per task, its answer at the last token. Shorter tasks have zeros in front, as a zero token adds nothing in
any of these models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.registry import create_mechanism
from linattn.ops.convolution.api import short_convolution, short_convolution_step
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.linear.api import linear_attention

OPEN_GATE = 3.0  # sigmoid(3) = 0.95: at first the last examples count nearly alike
CANON_WIDTH = 4
# These rows are tens of tokens long and one value wide: too small for kernels that are made for long sequences.
IMPL = "chunked"
MULTIPLE = 8  # multiple of head widths that every mechanism accepts


class LinearStack(nn.Module):
    """``f = sum_i (z^T Wq Wk^T z_i) (z_i^T v)``, z the last token: linear attention without a denominator.

    Wq, Wk ``(M, d+1, r)``; v ``(M, d+1)`` stands for the values' projection and the read-out, of which only the product
    matters. ``ranks`` gives each model its r; columns beyond it are zero in both factors, so no gradient changes them.
    """

    def __init__(self, models: int, width: int, generator: torch.Generator, ranks: list[int] | None = None) -> None:
        super().__init__()
        columns = width if ranks is None else max(ranks)
        self.query, self.key = (nn.Parameter(draw((models, width, columns), width, generator)) for _ in range(2))
        self.value = nn.Parameter(near_label((models, width), generator))
        if ranks is not None:
            allowed = (torch.arange(columns) < torch.tensor(ranks)[:, None, None]).to(generator.device)
            with torch.no_grad():
                self.query.mul_(allowed)
                self.key.mul_(allowed)

    def features(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``(M, B, 1, r)`` of the last token, k ``(M, B, T, r)``, v ``(M, B, T, 1)``."""
        q = project(tokens[:, :, -1:], self.query)
        return q, project(tokens, self.key), project(tokens, self.value.unsqueeze(-1))

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.features(tokens)
        return linear_attention(q, k, v, normalizer=None, impl=IMPL).flatten(1)


class AdaptedStack(nn.Module):
    """A frozen trained stack, plus ``U D^T`` of low rank added to ``Wq Wk^T``: LoRA."""

    def __init__(self, base: LinearStack, width: int, generator: torch.Generator, ranks: list[int]) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.update = LinearStack(len(ranks), width, generator, ranks)
        self.update.value.requires_grad_(False)
        with torch.no_grad():
            self.update.query.zero_()  # at the start nothing is added

    def forward(self, tokens: Tensor) -> Tensor:
        (q, k, v), (up, down, _) = self.base.features(tokens), self.update.features(tokens)
        q, k = torch.cat([q, up], dim=-1), torch.cat([k, down], dim=-1)
        return linear_attention(q, k, v, normalizer=None, impl=IMPL).flatten(1)


class H3Stack(nn.Module):
    """``f = sum_c q_c (filter * (k_c v_c))``: a gated long convolution, with one filter over the T tokens per model.

    q, k, v are projections of the tokens with d+1 channels, q that of the last one; the read-out is part of q. The
    filter's taps weight the examples, which linear attention cannot do.
    """

    def __init__(self, models: int, width: int, generator: torch.Generator, tokens: int) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(draw((models, width, width), width, generator)) for _ in range(2))
        self.value = nn.Parameter(near_label((models, width, width), generator))
        self.filter = nn.Parameter(1 + 0.2 * draw((models, tokens), 1, generator))

    def forward(self, tokens: Tensor) -> Tensor:
        M, B, _, C = tokens.shape
        q = project(tokens[:, :, -1:], self.query).squeeze(2)
        product = project(tokens, self.key) * project(tokens, self.value)
        product = product.permute(1, 2, 0, 3).flatten(2)  # (B, T, M C): models are channels to the convolution
        taps = self.filter.repeat_interleave(C, dim=0)
        state = ConvolutionState(product[:, :-1])
        # Only the last token's output is needed: one step after the others gives it.
        summed = short_convolution_step(product[:, -1], taps, None, state).output
        return (q * summed.view(B, M, C).transpose(0, 1)).sum(-1)


class GatedStack(LinearStack):
    """Linear attention whose state decays by ``sigmoid(g^T z_t + b)`` at every token."""

    def __init__(self, models: int, width: int, generator: torch.Generator) -> None:
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

    def __init__(self, models: int, width: int, generator: torch.Generator) -> None:
        super().__init__(models, width, generator)
        drawn = torch.rand(models * width, CANON_WIDTH, generator=generator, device=generator.device)
        self.taps = nn.Parameter((drawn - 0.5) * 2 * CANON_WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        M, B, T, C = tokens.shape
        rows = tokens.permute(1, 2, 0, 3).reshape(B, T, M * C)
        mixed = short_convolution(rows, self.taps, residual=True, impl=IMPL)
        return super().forward(mixed.view(B, T, M, C).permute(2, 0, 1, 3))


class MechanismStack(nn.Module):
    """``f = n r^T attend(Z Wq, Z Wk, Z Wv)`` at the last token, with one head of a causal mechanism.

    Mechanisms run one after the other, each on the tasks of its model, so that nothing leaks between models; this is
    slower than the other stacks. Tokens that are zero are padding and are masked. Most mechanisms return a mean over
    the examples, which times n is the sum that the other stacks return.
    """

    def __init__(self, name: str, models: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        head = -(-width // MULTIPLE) * MULTIPLE
        self.query, self.key, self.value = (
            nn.Parameter(draw((models, width, head), width, generator)) for _ in range(3)
        )
        self.read_out = nn.Parameter(draw((models, 1, head), head, generator))
        with torch.random.fork_rng():
            torch.manual_seed(generator.initial_seed())
            made = [
                create_mechanism(name, num_heads=1, head_dim=head, causal=True, input_dim=width) for _ in range(models)
            ]
        self.mechanisms = nn.ModuleList(made).to(generator.device)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (project(tokens, weight).unsqueeze(2) for weight in (self.query, self.key, self.value))
        real = tokens.detach().abs().sum(-1) > 0  # (M, B, T)
        outputs = [
            mechanism(q[i], k[i], v[i], key_mask=real[i], x=tokens[i])[:, 0, -1]
            for i, mechanism in enumerate(self.mechanisms)
        ]
        return (torch.stack(outputs) * self.read_out).sum(-1) * (real.sum(-1) - 1)


def project(tokens: Tensor, weight: Tensor) -> Tensor:
    """Multiply by each model's own matrix: ``(M, B, T, C)`` and ``(M, C, K)`` to ``(M, B, T, K)``."""
    M, B, T, _ = tokens.shape
    return torch.bmm(tokens.flatten(1, 2), weight).view(M, B, T, -1)


def make_stack(model: str, models: int, width: int, tokens: int, generator: torch.Generator) -> nn.Module:
    """A stack by the name of its model: linear, h3, gated, canon, or a registered mechanism."""
    if model == "h3":
        return H3Stack(models, width, generator, tokens)
    kinds = {"linear": LinearStack, "gated": GatedStack, "canon": CanonStack}
    return kinds[model](models, width, generator) if model in kinds else MechanismStack(model, models, width, generator)


def near_label(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values ``(M, d+1, ...)`` that start near the label alone: from a random direction some models never find it."""
    values = 0.2 * draw(shape, shape[1], generator)
    values[:, -1] += 1
    return values


def draw(shape: tuple[int, ...], width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device) / width**0.5
