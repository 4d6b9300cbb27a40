"""Learns random features layer by layer, from queries and keys alone; the model itself does not change."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn

from linattn.convert.degrees.kernel import PositiveFeatures, log_estimate, scaled
from linattn.support.options import OptionError, check_option

LARGEST_LOG = 30.0  # bound on the logarithm of an estimate, in units of the largest kernel value


@dataclass(frozen=True)
class LearnOptions:
    """Options of the learning: Adam with the paper's rates, which fall linearly to zero over ``steps``."""

    steps: int = 300
    loss: Literal["softmax", "l2"] = "softmax"
    """``"softmax"``: cross-entropy of attention rows, the paper's best. ``"l2"``: squared error of the kernel."""
    lr_z: float = 0.02
    lr_alpha: float = 0.2
    """Learning rate of log alpha; in this form alpha stays positive by itself."""
    causal: bool = True
    rows: int | None = 128
    """Queries drawn from each sequence in a step; None: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_option("loss", self.loss, ("softmax", "l2"))
        for name in ("steps", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"must be an integer >= 1, got {value}")
        for name in ("lr_z", "lr_alpha"):
            if not getattr(self, name) >= 0:
                raise OptionError(name, f"must be >= 0, got {getattr(self, name)}")


class Pairs(NamedTuple):
    """Scaled queries and keys of some rows of attention, and which keys each query sees."""

    q: Tensor  # (B, H_kv, group x rows, D)
    k: Tensor  # (B, H_kv, T, D)
    visible: Tensor  # (B, 1, group x rows, T), bool
    real: Tensor  # (B, 1, group x rows), bool: the query is a token


def attention_row_loss(pairs: Pairs, features: PositiveFeatures) -> Tensor:
    """Mean over rows of ``KL(p || p^)``, with p the softmax row and p^ the row of ``K^`` divided by its sum.

    It is the cross-entropy less the entropy of p, which no parameter changes; 0 means that the rows are equal.
    """
    scores = (pairs.q @ pairs.k.mT).masked_fill(~pairs.visible, -torch.inf)
    estimate = log_estimate(pairs.q, pairs.k, features).masked_fill(~pairs.visible, -torch.inf)
    log_p, log_e = scores.log_softmax(-1), estimate.log_softmax(-1)
    terms = log_p.exp() * (log_p - log_e).masked_fill(~pairs.visible, 0)
    return _mean_rows(terms.sum(-1), pairs.real)


def kernel_loss(pairs: Pairs, features: PositiveFeatures) -> Tensor:
    """Mean over rows of ``sum (K - K^)^2``, both divided by the largest K of the head, since K itself overflows."""
    scores = (pairs.q @ pairs.k.mT).masked_fill(~pairs.visible, -torch.inf)
    unit = scores.amax((0, 2, 3), keepdim=True)
    # Bounded, so that its square stays finite in fp32.
    estimate = (log_estimate(pairs.q, pairs.k, features) - unit).clamp_max(LARGEST_LOG).exp()
    terms = ((scores - unit).exp() - estimate).masked_fill(~pairs.visible, 0).square()
    return _mean_rows(terms.sum(-1), pairs.real)


LOSSES = {"softmax": attention_row_loss, "l2": kernel_loss}


class FeatureLearner:
    """Learns z and alpha of one layer; each :meth:`step` takes the queries and keys of one batch."""

    def __init__(self, start: PositiveFeatures, options: LearnOptions, scale: float | None = None) -> None:
        self.options, self.scale = options, scale
        self.z = nn.Parameter(start.z.detach().float().clone())
        self.log_alpha = nn.Parameter(start.log_alpha.detach().float().clone())
        self.curve: list[float] = []
        rates = [{"params": [self.z], "lr": options.lr_z}, {"params": [self.log_alpha], "lr": options.lr_alpha}]
        self._optimizer = torch.optim.Adam(rates)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.0, options.steps)
        self._generator = Generator().manual_seed(options.seed)

    def step(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> float:
        """Make one step on ``q (B, H, T, D)`` and ``k (B, H_kv, T, D)``; returns the loss before it."""
        with torch.enable_grad():
            loss = self.loss(q, k, key_mask)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
        self._optimizer.step()
        self._schedule.step()
        self.curve.append(float(loss.detach()))
        return self.curve[-1]

    def loss(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        options = self.options
        pairs = select_pairs(
            q, k, key_mask, causal=options.causal, rows=options.rows, scale=self.scale, generator=self._generator
        )
        return LOSSES[options.loss](pairs, PositiveFeatures(self.z, self.log_alpha))

    def features(self) -> PositiveFeatures:
        return PositiveFeatures(self.z.detach().clone(), self.log_alpha.detach().clone())


def learn_features(
    start: PositiveFeatures, batches: Iterable[tuple[Tensor, Tensor]], options: LearnOptions, scale: float | None = None
) -> tuple[PositiveFeatures, list[float]]:
    """Learn from ``(q, k)`` batches, repeated until ``options.steps`` are done; returns features and loss per step."""
    learner = FeatureLearner(start, options, scale)
    while len(learner.curve) < options.steps:
        before = len(learner.curve)
        for q, k in batches:
            learner.step(q, k)
            if len(learner.curve) == options.steps:
                break
        if len(learner.curve) == before:
            raise ValueError("batches must hold at least one pair (q, k), and must be read again from the start")
    return learner.features(), learner.curve


def select_pairs(
    q: Tensor, k: Tensor, key_mask: Tensor | None = None, *, causal: bool, rows: int | None = None,
    scale: float | None = None, generator: Generator | None = None,
) -> Pairs:  # fmt: skip
    """Pair ``rows`` queries of each head, at positions that all heads share, with all keys that they see; in fp32."""
    B, H_kv, T, _ = k.shape
    groups = q.shape[1] // H_kv
    positions = torch.arange(T)
    if rows is not None and rows < T:
        positions = torch.randperm(T, generator=generator)[:rows].sort().values
    positions = positions.to(k.device)
    queries = scaled(q.detach().float(), scale)[:, :, positions].unflatten(1, (H_kv, groups)).flatten(2, 3)
    tokens = torch.arange(T, device=k.device)
    visible = tokens <= positions.unsqueeze(-1) if causal else tokens.new_ones(len(positions), T, dtype=torch.bool)
    visible = visible.repeat(groups, 1).expand(B, 1, -1, -1)
    real = visible.new_ones(B, 1, groups * len(positions))
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
        real = key_mask[:, positions].repeat(1, groups).unsqueeze(1)
        # A padded query sees one key, so that its softmax is finite; the mean over rows leaves it out.
        visible = visible | (~real.unsqueeze(-1) & (tokens == 0))
        k = k.masked_fill(~key_mask[:, None, :, None], 0)  # whatever padding holds, even NaN, is ignored
        queries = queries.masked_fill(~real.unsqueeze(-1), 0)
    return Pairs(queries, scaled(k.detach().float(), scale), visible, real)


def _mean_rows(values: Tensor, real: Tensor) -> Tensor:
    real = real.expand_as(values)
    return values.masked_fill(~real, 0).sum() / real.sum().clamp_min(1)
