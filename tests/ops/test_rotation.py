"""``rotate`` in linear attention: features of the numerator alone, in every form."""

import math

import pytest
import torch
from torch import Tensor

from linattn import linear_attention
from linattn.ops.maps import EluPlusOne
from linattn.ops.shared.rotation import Rotation, Turns, turn_pairs

FORMS = ["reference", "recurrent", "chunked"]


class ByPlace(Rotation):
    """Pair i of token t turns by t + i, keys backwards."""

    def of_queries(self, features: int, like: Tensor) -> Turns:
        angle = torch.arange(9.0, dtype=like.dtype)[:, None] + torch.arange(features // 2)
        return Turns(angle.cos(), angle.sin())

    def of_keys(self, features: int, like: Tensor) -> Turns:
        cos, sin = self.of_queries(features, like)
        return Turns(cos, -sin)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_pairs_turn_in_blocks():
    x, angle = draw(3, 8), draw(3, 2, seed=1)
    turned = turn_pairs(x, Turns(angle.cos(), angle.sin()))
    for t in range(3):
        for pair in range(4):
            (a, b), by = x[t, 2 * pair : 2 * pair + 2].tolist(), angle[t, pair % 2].item()
            expected = [a * math.cos(by) - b * math.sin(by), a * math.sin(by) + b * math.cos(by)]
            assert turned[t, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_denominator_keeps_its_features(impl, causal):
    q, k, v = draw(2, 4, 9, 6), draw(2, 2, 9, 6, seed=1), draw(2, 2, 9, 5, seed=2)
    gate, mask = -draw(2, 2, 9, seed=3).abs(), draw(2, 9, seed=4) < 0.8
    options = {"causal": causal, "key_mask": mask, "log_decay": gate, "log_input": gate, "impl": impl}
    found = linear_attention(q, k, v, feature_map=EluPlusOne(), rotate=ByPlace(), **options)
    phi, psi = EluPlusOne()(q), EluPlusOne()(k)
    turned = ByPlace()(phi, psi)
    torch.testing.assert_close(found, linear_attention(*turned, v, norm_features=(phi, psi), **options))
    alone = linear_attention(q, k, v, feature_map=EluPlusOne(), rotate=ByPlace(), normalizer=None, **options)
    torch.testing.assert_close(alone, linear_attention(*turned, v, normalizer=None, **options))
