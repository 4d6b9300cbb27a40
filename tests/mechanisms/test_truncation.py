"""``truncated`` names exactly the vectors whose negative parts a mechanism cannot see."""

import pytest
import torch

from linattn import create_mechanism, list_mechanisms

CUT = {"relu", "focused", "cosformer", "mirror"}


def draw(tokens: int = 6) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, 2, tokens, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


@pytest.mark.parametrize("name", list_mechanisms())
def test_which_mechanisms_truncate(name):
    info_causal = name not in list_mechanisms(bidirectional=True)
    mechanism = create_mechanism(name, num_heads=2, head_dim=8, causal=info_causal).double()
    q, k, _ = draw()
    found = mechanism.truncated(q, k)
    assert (found is not None) == (name in CUT)
    if found is not None:
        assert (found[0].shape, found[1].shape) == (q.shape, k.shape)


@pytest.mark.parametrize("name", ["relu", "focused", "cosformer"])
def test_the_negative_parts_of_the_vectors_change_nothing(name):
    q, k, v = draw()
    mechanism = create_mechanism(name, num_heads=2, head_dim=8).double()
    cut_q, cut_k = (y.clamp(min=0) for y in mechanism.truncated(q, k))
    torch.testing.assert_close(mechanism(cut_q, cut_k, v), mechanism(q, k, v), rtol=0, atol=1e-12)
    assert (cut_q != q).any()


@pytest.mark.parametrize("name", sorted(set(list_mechanisms(bidirectional=True)) - CUT))
def test_mechanisms_that_declare_none_do_see_negative_parts(name):
    """Else the default would hide a truncation."""
    mechanism = create_mechanism(name, num_heads=2, head_dim=8).double()
    q, k, v = draw()
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    away = (mechanism(q.clamp(min=0), k.clamp(min=0), v, x=x) - mechanism(q, k, v, x=x)).abs().amax()
    assert away > 1e-4


@pytest.mark.parametrize("modulation", ["sequence", "token", "none"])
def test_mirror_truncates_its_reflected_vectors(modulation):
    torch.manual_seed(0)
    mirror = create_mechanism("mirror", num_heads=2, head_dim=8, modulation=modulation).double()
    if mirror.amplitude is not None:
        torch.nn.init.normal_(mirror.amplitude)
    q, k, v = draw()
    reflected = mirror.truncated(q, k)
    # What comes after the reflection is linear attention with ReLU features, eps on the mean.
    scores = reflected[0].clamp(min=0) @ reflected[1].clamp(min=0).mT
    expected = scores @ v / (scores.sum(-1, keepdim=True) + 6e-6)
    torch.testing.assert_close(mirror(q, k, v), expected, rtol=0, atol=1e-12)
