"""The maps of the pseudo-hyperboloid, against each other and against formulas written apart."""

import math

import pytest
import torch

from linattn.models.graph import PseudoHyperboloid
from linattn.models.graph.manifold import (
    arc,
    arc_over_sine,
    cosine_and_sine,
    from_pole,
    merge,
    midpoint,
    onto_sphere,
    residual,
    restored,
)
from models.graph.graphs import SIGNATURES, check_on_manifold, close, inner, random_points

every_space = pytest.mark.parametrize(("signature", "radius"), [(s, r) for s in SIGNATURES for r in (1.0, 1.7)])


def joined_pairs(signature, radius):
    """A space, and pairs of its points, with those that a geodesic joins."""
    space = PseudoHyperboloid(*signature, radius)
    x, y = (random_points(signature, 60, radius).joined() for _ in range(2))
    return space, x, y, inner(x, y, signature[0]) < 0.9 * radius**2  # at r^2 the formulas lose all digits


@every_space
def test_psi_and_its_inverse(signature, radius):
    space = PseudoHyperboloid(*signature, radius)
    x = random_points(signature, 40, radius)
    check_on_manifold(x, radius)
    back = space.psi(x.joined())
    close(back.sphere, x.sphere)
    close(back.space, x.space)
    close(space.psi(x.joined()).joined(), x.joined())
    h = x.hyperboloid
    close(h[:, 0] ** 2 - (h[:, 1:] ** 2).sum(1), torch.full((40,), radius**2))


@every_space
def test_exp_log_distance_and_transport_agree(signature, radius):
    space, x, y, joined = joined_pairs(signature, radius)
    assert joined.sum() > 20
    x, y, q = x[joined], y[joined], signature[0]
    v = space.log(x, y)
    close(inner(v, x, q), torch.zeros(len(x)))
    close(space.exp(x, v), y)
    close(space.distance(x, y), inner(v, v, q).abs().sqrt())
    close(space.transport(x, y, v), -space.log(y, x))  # the velocity on arrival
    u, w = (a + inner(a, x, q)[:, None] / radius**2 * x for a in torch.randn(2, *x.shape).unbind())
    moved = [space.transport(x, y, a) for a in (u, w)]
    close(inner(moved[0], y, q), torch.zeros(len(x)), 1e-9)
    close(inner(*moved, q), inner(u, w, q), 1e-9)


@pytest.mark.parametrize("radius", [1.0, 1.7])
def test_distances_of_hyperboloid_and_sphere(radius):
    for signature, sign, arc_of in (((0, 5), -1, torch.acosh), ((4, 0), 1, torch.acos)):
        x, y = (random_points(signature, 30, radius).joined() for _ in range(2))
        product = (x[:, 1:] * y[:, 1:]).sum(1) + sign * x[:, 0] * y[:, 0]
        close(PseudoHyperboloid(*signature, radius).distance(x, y), radius * arc_of(sign * product / radius**2), 1e-9)


def test_points_that_no_geodesic_joins():
    space, x, y, _ = joined_pairs((3, 4), 1.7)
    apart = inner(x, y, 3) >= 1.7**2
    assert 0 < apart.sum() < len(x)
    assert torch.equal(space.log(x, y).isnan().any(-1), apart)
    x, y = x[apart], y[apart]
    close(space.distance(x, y), 1.7 * (math.pi + torch.acosh(inner(x, y, 3) / 1.7**2)))


@every_space
def test_the_pole_reaches_every_point_of_phi(signature, radius):
    space = PseudoHyperboloid(*signature, radius)
    x = space.phi(random_points(signature, 40, radius).joined())
    wide = space.extended()
    close(wide.log(wide.pole(x), x), math.pi / 2 * x)


@every_space
def test_residual_and_merge_are_their_definitions(signature, radius):
    space = PseudoHyperboloid(*signature, radius)
    wide = space.extended()
    x, y = (random_points(signature, 40, radius) for _ in range(2))
    X, Y = space.phi(x.joined()), space.phi(y.joined())
    pole = wide.pole(X).expand_as(X)
    for result, wanted in (
        (residual(x, y), wide.exp(Y, wide.transport(pole, Y, wide.log(pole, X)))),
        (merge(x, y, 0.3), wide.exp(pole, 0.3 * wide.log(pole, X) + 0.7 * wide.log(pole, Y))),
    ):
        assert (result.q, result.p) == (signature[0] + 1, signature[1])
        check_on_manifold(result, radius)
        close(result.joined(), wanted)


@every_space
def test_midpoint_is_as_far_from_both(signature, radius):
    x, y = (random_points(signature, 40, radius) for _ in range(2))
    middle = midpoint(x, y)
    check_on_manifold(middle, radius)
    hyperboloid = PseudoHyperboloid(0, max(signature[1], 1), radius)
    sphere = PseudoHyperboloid(max(signature[0], 1), 0, radius)
    if signature[1]:
        ways = [hyperboloid.distance(middle.hyperboloid, z.hyperboloid) for z in (x, y)]
        close(ways[0], ways[1])
        close(ways[0] + ways[1], hyperboloid.distance(x.hyperboloid, y.hyperboloid))
    if signature[0]:
        close(sphere.distance(middle.sphere, x.sphere), sphere.distance(middle.sphere, y.sphere), 1e-9)
    assert (midpoint(x, y, 1.0).joined() - x.joined()).abs().max() < 1e-9


@every_space
def test_exp_at_the_pole(signature, radius):
    q, p = signature
    space = PseudoHyperboloid(q, p, radius)
    v = torch.cat([torch.zeros(30, 1), torch.randn(30, q + p)], 1)
    got = from_pole(v[:, 1 : q + 1], v[:, q + 1 :], radius)
    check_on_manifold(got, radius)
    close(got.joined(), space.exp(space.pole(v), v))


def test_arcs_by_complex_numbers():
    """Both kinds of geodesic are one function of a complex root; points lie on both sides of the series' borders."""
    z = torch.tensor([-9.0, -1.0, -0.0101, -0.0099, -1e-5, 1e-9, 0.0099, 0.0101, 0.5, 20.0])
    s = z.to(torch.complex128).sqrt()
    for got, wanted in zip(cosine_and_sine(z), (s.cosh().real, (s.sinh() / s).real), strict=True):
        close(got / wanted, torch.ones_like(z), 1e-14)
    delta = torch.tensor([-1.9, -1.0, -0.0101, -0.0099, -1e-4, 1e-4, 0.0099, 0.0101, 3.0, 1e4])
    angle = torch.acosh(1 + delta.to(torch.complex128)).abs()
    close(arc(delta) / angle, torch.ones_like(delta), 1e-11)
    close(arc_over_sine(delta) * (delta * (delta + 2)).abs().sqrt() / angle, torch.ones_like(delta), 1e-11)


def test_gradients_are_right_near_the_pole():
    """Where the usual formulas divide 0 by 0: at the pole, at equal points, between light-like neighbours."""
    space = PseudoHyperboloid(2, 2)
    pole = space.pole(torch.zeros(1))
    null = torch.tensor([0.0, 1e-6, 0.0, 1e-6, 0.0])
    for v in (torch.zeros(5), null, 1e-9 * torch.tensor([0, 1.0, 2, 3, -1])):
        v.requires_grad_()
        jacobian = torch.autograd.functional.jacobian(lambda v: space.exp(pole, v), v)
        close(jacobian, torch.eye(5) - 0 * jacobian, 1e-5)
        (gradient,) = torch.autograd.grad(space.log(pole, space.exp(pole, v)).sum(), v)
        close(gradient[1:], torch.ones(4), 1e-5)
        (gradient,) = torch.autograd.grad(space.distance(pole, space.exp(pole, v)), v)
        assert gradient.isfinite().all()
    tangent = torch.zeros(1, 4, requires_grad=True)
    point = from_pole(tangent[:, :2], tangent[:, 2:], 1.0)
    (gradient,) = torch.autograd.grad(point.joined().sum(), tangent)
    close(gradient, torch.ones(1, 4))


def test_a_vector_without_direction_becomes_the_pole():
    for size in (0.0, 1e-200, 1e-320):
        a = torch.full((1, 3), size, requires_grad=True)
        s = onto_sphere(a, 1.7)
        assert torch.equal(s, torch.tensor([[1.7, 0, 0]]))
        (gradient,) = torch.autograd.grad(s.sum(), a)
        assert gradient.isfinite().all()
    for size in (1e-100, 1e200):
        close(onto_sphere(torch.full((1, 3), size), 1.7), torch.full((1, 3), 1.7 / math.sqrt(3)))


def test_fp32_keeps_the_digits_of_small_distances():
    """Points a thousandth apart: by ``arccosh(<x, y>)`` a tenth of the distance would be lost in fp32."""
    space = PseudoHyperboloid(3, 4)
    x = random_points((3, 4), 100).joined()
    step = 1e-3 * torch.randn(100, 8)
    step = step + space.inner(step, x) * x
    x, y = x.float(), space.exp(x, step).float()
    wanted = space.distance(x.double(), y.double())
    clear = wanted > 3e-4  # others are nearly light-like, where a distance has no digits
    assert clear.sum() > 50
    assert ((space.distance(x, y) - wanted) / wanted)[clear].abs().max() < 1e-3


def test_fp32_stays_on_the_manifold_far_out():
    """A point whose coordinates pass a million: cut, not infinite, and its gradient too."""
    tangent = torch.full((1, 6), 1e3, dtype=torch.float32, requires_grad=True)
    point = from_pole(tangent[:, :2], tangent[:, 2:], 1.0)
    assert 1e5 < point.height.item() < 1e7
    assert (point.sphere.norm() - 1).abs() < 1e-6
    far = residual(point, restored(torch.randn(1, 3).float(), 1e6 * torch.randn(1, 4).float(), 1.0))
    far.joined().sum().backward()
    assert tangent.grad.isfinite().all()
    assert far.height.isfinite().all()


def test_a_signature_without_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"\(q, p\)"):
        PseudoHyperboloid(0, 0)
