"""QT-ViT: the exponential's second-order Taylor series, exact or with squares alone."""

from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, MechanismOutput
from linattn.mechanisms.common.linear import WideLinear, wide
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import Squares, TaylorExp
from linattn.ops.shared.call import check_choice, check_flag

FORMS = ("compact", "exact", "normalized")
EPS = 1e-15  # as in the official code; the row sums are far from 0 without it


@register_mechanism("quadratic", paper="QT-ViT, NeurIPS", year=2024)
class Quadratic(WideLinear):
    """Linear attention with the exponential's second-order Taylor series, reduced to squares.

    ``o_t = sum_s w_ts v_s / sum_s w_ts``, with the weights

    - ``"exact"``: ``w = 1 + z + z^2/2 = ((1 + z)^2 + 1)/2 >= 1/2``, ``z = q_t.k_s / sqrt(D)``; (D+1)(D+2)/2 features;
    - ``"compact"``: ``w = (alpha^2 sum_i q_i^2 k_i^2 [+ beta^2 2 z] + gamma^2 + 1)/2``; D + 1 [or 2D + 1] features;
    - ``"normalized"``: ``w = q^2/|q^2| . k^2/|k^2| + c^2``, squares taken per channel, as in the official code; D + 1.

    alpha, beta, gamma and c are learned numbers and start at 1. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``,
    output ``(B, H, T, D)``. The paper's multi-scale projections and its normed branch of v belong to the layer.

    Paper: Xu et al., QT-ViT: Improving Linear Attention in ViT with Quadratic Taylor Expansion. State per kv head:
    features times ``D + 1`` numbers.

    Args:
        form: ``"compact"``, ``"exact"`` or ``"normalized"``.
        linear_term: whether the compact form has the bracketed term, the only one that sees the sign of q.k. The paper
            defines it but leaves it out of all experiments.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("quadratic", num_heads=2, head_dim=8, form="compact")
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.num_features
        (torch.Size([1, 2, 5, 8]), 9)
    """

    rotates: ClassVar[Literal["inputs"]] = "inputs"  # one of the features is a constant
    # Parameters that the form does not have are None.
    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    c: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        form: Literal["compact", "exact", "normalized"] = "compact",
        linear_term: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_choice("form", form, FORMS)
        check_flag("linear_term", linear_term)
        if linear_term and form != "compact":
            raise ValueError(f'linear_term is an option of form="compact", got form={form!r}')
        self.form, self.linear_term = form, linear_term
        names = {"exact": (), "normalized": ("c",), "compact": ("alpha", "beta", "gamma")}[form]
        for name in ("alpha", "beta", "gamma", "c"):
            used = name in names and (name != "beta" or linear_term)
            self.register_parameter(name, nn.Parameter(torch.empty(1)) if used else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every learned number to 1.

        The compact form is then not the Taylor series: its squares ``q_i^2 k_i^2`` weigh D times as much as in
        ``z^2/2``, to make up for the mixed products that it leaves out. It has z itself only with ``linear_term``.
        """
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def features(self, x: Tensor) -> Tensor:
        """``(B, H, T, D) -> (B, H, T, num_features)`` in fp32 or fp64; their inner product is w."""
        x = wide(x)
        if self.form == "compact":
            return self.compact()(x)
        if self.form == "exact":
            return TaylorExp()(x)
        # x^2/|x^2| does not depend on |x|; dividing by it first keeps the squares in range.
        squares = _unit(_unit(x).square())
        return torch.cat([squares, torch.ones_like(x[..., :1]) * wide(self.c)], dim=-1)

    def compact(self) -> Squares:
        """The map of the compact form."""
        half = 0.5**0.5
        linear = half * (4 / self.head_dim) ** 0.25 * wide(self.beta).squeeze() if self.linear_term else None
        constant = half * (wide(self.gamma).squeeze().square() + 1).sqrt()  # gamma and the series' 1 as one number
        return Squares(half * wide(self.alpha).squeeze(), linear, constant, self.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if self.form == "compact":
            return self.linear(call, {"q": q, "k": k, "v": v, "feature_map": self.compact(), "eps": EPS})
        return self.linear(call, {"q": self.features(q), "k": self.features(k), "v": v, "eps": EPS})

    @property
    def num_features(self) -> int:
        if self.form == "exact":
            return TaylorExp().num_features(self.head_dim)
        return self.head_dim * (2 if self.linear_term else 1) + 1


def _unit(x: Tensor) -> Tensor:
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + EPS)
