"""Rotary positions that a layer hands in: each of these mechanisms turns what its paper's code turns."""

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism, list_mechanisms, mechanism_info
from mechanisms.formulas import TOLERANCE, draw, per_query_head, scores


def build(name: str, **options):
    return create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=6, **options).double()


def turn(x: Tensor) -> Tensor:
    """Neighbouring channels turned by the token's place in radians."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).flatten(-2)


def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return turn(q), turn(k)


def elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def quotient(numerator: Tensor, denominator: Tensor, v: Tensor) -> Tensor:
    return numerator @ per_query_head(v, 4) / (denominator.sum(-1, keepdim=True) + 11e-6)


@pytest.mark.parametrize("name", [n for n in list_mechanisms(bidirectional=True) if mechanism_info(n).cls.rotates])
def test_turned_width_is_what_a_rotation_gets(name):
    mechanism, widths = create_mechanism(name, num_heads=2, head_dim=8), set()

    def watch(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        widths.update((q.shape[-1], k.shape[-1]))
        return q, k

    q, k, v = torch.randn(3, 1, 2, 12, 8)
    mechanism(q, k, v, x=torch.randn(1, 12, 16), rotate=watch)
    assert widths == {mechanism.turned_width}


def test_mala():
    """Scores are turned, their mean is not, and it is taken away from every weight."""
    q, k, v = draw()
    m = scores(elu(q), elu(k)).mean(-1, keepdim=True) / 6**0.5
    weights = ((1 + 1 / (m + 1e-6)) * scores(turn(elu(q)), turn(elu(k))) / 6**0.5 - m) / 11
    torch.testing.assert_close(build("mala")(q, k, v, rotate=rotate), weights @ per_query_head(v, 4), **TOLERANCE)


def test_rala():
    q, k, v = draw()
    mean = elu(q).mean(2).unflatten(1, (2, 2)).mean(2).unsqueeze(2)
    keys = elu(k) * 11 * ((mean * elu(k)).sum(-1, keepdim=True) / 6**0.5).softmax(2)
    expected = quotient(scores(turn(elu(q)), turn(keys)), scores(elu(q), keys), v)
    torch.testing.assert_close(build("rala")(q, k, v, rotate=rotate), expected, **TOLERANCE)


def test_pola_plus():
    q, k, v = draw()
    qp, qn, kp, kn = (x.clamp(min=0) for x in (q, -q, k, -k))
    keys = torch.cat([kp, kn], dim=-1).expm1()
    halves = []
    for x, own in ((torch.cat([qp, qn], dim=-1), v[..., :3]), (torch.cat([qn, qp], dim=-1), v[..., 3:])):
        phi = (x / 2).expm1()
        halves.append(quotient(scores(turn(phi), turn(keys)), scores(phi, keys), own))
    found = build("pola_plus")(q, k, v, rotate=rotate)
    torch.testing.assert_close(found, torch.cat(halves, dim=-1), **TOLERANCE)


@pytest.mark.parametrize(("name", "options"), [("inline", {}), ("quadratic", {"form": "exact"}), ("quadratic", {})])
def test_inputs_are_turned_once(name, options):
    q, k, v = draw()
    mechanism = build(name, **options)
    torch.testing.assert_close(mechanism(q, k, v, rotate=rotate), mechanism(turn(q), turn(k), v), **TOLERANCE)


@pytest.mark.parametrize("name", ["focused", "mirror", "nala"])
def test_rotated_features_are_for_the_numerator(name):
    """Turned by nothing they give what they were; turned around, the numerator changes its sign and no more."""
    q, k, v = draw(kv_heads=4)
    mechanism = create_mechanism(name, num_heads=4, head_dim=6).double()
    plain = mechanism(q, k, v)
    torch.testing.assert_close(mechanism(q, k, v, rotate=lambda q, k: (q, k)), plain, **TOLERANCE)
    torch.testing.assert_close(mechanism(q, k, v, rotate=lambda q, k: (q, -k)), -plain, **TOLERANCE)
