import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import create_mechanism
from linattn.testing import check_mechanism
from mechanisms.formulas import TOLERANCE, draw, draw_x, per_query_head

ALL_FORMS = ("reference", "recurrent", "chunked", "auto")
DECAYS = [
    {"decay": "none"},
    {"decay": "fixed"},
    {"decay": "selective"},
    {"decay": "fixed", "decay_per": "channel"},
    {"decay": "selective", "decay_per": "channel"},
]


def build(dim: int = 6, **options):
    torch.manual_seed(0)
    mechanism = create_mechanism("lion", num_heads=4, num_kv_heads=2, head_dim=dim, input_dim=10, **options).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mechanism


def phi(x: Tensor) -> Tensor:
    shifted = x * torch.sigmoid(x) + 0.5
    return shifted / shifted.norm(dim=-1, keepdim=True)


def lambdas(decays, x: Tensor, dim: int = 6) -> Tensor:
    """(B, H_kv, T, D), from the parameters by hand."""
    batch, length = x.shape[:2]
    if hasattr(decays, "log_rate"):
        rate = decays.log_rate.exp()[:, None].expand(-1, length, -1)
        if decays.gate is not None:
            gate = (x @ decays.gate.weight.T + decays.gate.bias).reshape(batch, length, 2, dim).transpose(1, 2)
            rate = rate * (1 + torch.sigmoid(gate))
        return torch.exp(-rate).expand(batch, -1, -1, -1)
    if decays.gate is None:
        own = torch.sigmoid(decays.logit)[None, :, None].expand(batch, -1, length)
    else:
        own = torch.sigmoid(x @ decays.gate.weight.T + decays.gate.bias).transpose(1, 2)
    return own.unsqueeze(-1).expand(-1, -1, -1, dim)


def mask(decay: Tensor, index: str, causal: bool) -> Tensor:
    """M (B, H_kv, T, T, D), pair by pair: a product of the decays between, and of the key's or the query's own."""
    length = decay.shape[2]
    m = torch.zeros(*decay.shape[:2], length, length, decay.shape[3], dtype=decay.dtype)
    for t in range(length):
        for s in range(length):
            if s > t and causal:
                continue
            inner = range(min(s, t) + 1, max(s, t))
            end = [s if index == "key" else t] if s != t else []
            m[:, :, t, s] = decay[:, :, [*inner, *end]].prod(2)
    return m


def formula(q: Tensor, k: Tensor, v: Tensor, m: Tensor, normalized: bool = True, features=phi) -> Tensor:
    m = per_query_head(m, 4)
    w = torch.einsum("bhtd,bhsd,bhtsd->bhts", features(q), per_query_head(features(k), 4), m)
    out = w @ per_query_head(v, 4)
    return out / (w.sum(-1, keepdim=True) + 1e-6) if normalized else out


@pytest.mark.parametrize("options", DECAYS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("index", ["key", "query", None])
@pytest.mark.parametrize("impl", ALL_FORMS)
def test_formula(impl, index, causal, options):
    q, k, v = draw()
    x = draw_x()
    mechanism = build(impl=impl, causal=causal, decay_index=index, **options)
    decay = lambdas(mechanism.decays[0], x) if options["decay"] != "none" else torch.ones(2, 2, 11, 6).double()
    expected = formula(q, k, v, mask(decay, index or ("query" if causal else "key"), causal))
    torch.testing.assert_close(mechanism(q, k, v, x=x), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("features", "by_hand", "normalizer"),
    [
        ("elu", lambda x: F.elu(x) + 1, "sum"),
        ("sigmoid", torch.sigmoid, "sum"),
        ("sigmoid", torch.sigmoid, None),
        ("identity", lambda x: x, None),
    ],
)
def test_other_features(features, by_hand, normalizer):
    q, k, v = draw()
    mechanism = build(decay="fixed", features=features, normalizer=normalizer)
    m = mask(lambdas(mechanism.decays[0], draw_x()), "key", False)
    scale = 6**-0.5 if features == "identity" else 1
    expected = formula(q, k, v, m, normalized=normalizer == "sum", features=by_hand) * scale
    torch.testing.assert_close(mechanism(q, k, v), expected, **TOLERANCE)


def test_initial_values():
    torch.manual_seed(0)
    fixed = create_mechanism("lion", num_heads=4000, head_dim=2, decay="fixed").decays[0].logit
    assert fixed.mean().abs() < 0.1  # N(0, 1): 6 standard errors of 4000 draws
    assert (fixed.std() - 1).abs() < 0.1
    selective = create_mechanism("lion", num_heads=4, head_dim=16).decays[0].gate
    assert selective.weight.shape == (4, 64)
    assert not selective.bias.any()
    assert selective.weight.std() < 0.03
    channel = create_mechanism("lion", num_heads=3, head_dim=4, decay="fixed", decay_per="channel").decays[0]
    steps = torch.tensor([0.001, 0.01, 0.1])
    torch.testing.assert_close(channel(None), -steps[:, None] * torch.arange(1, 5))
    assert build(decay="none").num_parameters == 0


# Rows of 3 x 4 tokens, every other one backwards; then columns.
BY_ROWS = [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11]
BY_COLUMNS = [0, 4, 8, 9, 5, 1, 2, 6, 10, 11, 7, 3]


def plane_mask(mechanism, x: Tensor, order: list[int], number: int, prefix: int = 0) -> Tensor:
    """M of one order, back in the places of the tokens."""
    order = [*range(prefix), *(prefix + token for token in order)]
    decay = lambdas(mechanism.decays[number], x)
    if prefix and mechanism.decay == "selective":
        decay = torch.cat([torch.ones_like(decay[:, :, :prefix]), decay[:, :, prefix:]], dim=2)
    own = mask(decay[:, :, order], "key", False)
    back = torch.tensor(order).argsort()
    return own[:, :, back][:, :, :, back]


@pytest.mark.parametrize("options", [{}, {"normalizer": None}, {"num_prefix_tokens": 2}], ids=str)
@pytest.mark.parametrize("decay", DECAYS[1:], ids=str)
@pytest.mark.parametrize("impl", ALL_FORMS)
def test_snake(impl, decay, options):
    prefix = options.get("num_prefix_tokens", 0)
    q, k, v = draw(length=12 + prefix)
    x = draw_x(12 + prefix)
    mechanism = build(order="snake", impl=impl, **decay, **options)
    assert len(mechanism.decays) == 2
    m = sum(plane_mask(mechanism, x, order, n, prefix) for n, order in enumerate((BY_ROWS, BY_COLUMNS))) / 2
    expected = formula(q, k, v, m, normalized=mechanism.normalizer is not None)
    torch.testing.assert_close(mechanism(q, k, v, x=x, spatial_shape=(3, 4)), expected, **TOLERANCE)


def test_snake_with_padding_and_packed():
    q, k, v = draw(length=12)
    x = draw_x(12)
    mechanism = build(order="snake")
    whole = mechanism(q, k, v, x=x, spatial_shape=(3, 4))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[:, [2, 7]] = False
    filled = [t.masked_fill(~real[:, None, :, None], float("nan")).requires_grad_() for t in (k, v)]
    found = mechanism(q, *filled, x=x, spatial_shape=(3, 4), key_mask=real)
    for gradient in torch.autograd.grad(found[:, :, real[0]].sum(), filled):
        assert gradient[:, :, real[0]].isfinite().all()
        assert not gradient[:, :, ~real[0]].any()  # NaN is not 0
    masks = []
    for n, order in enumerate((BY_ROWS, BY_COLUMNS)):
        kept = [token for token in order if token not in (2, 7)]
        m = torch.zeros(2, 2, 12, 12, 6, dtype=torch.float64)
        lam = lambdas(mechanism.decays[n], x)
        m[:, :, torch.tensor(kept)[:, None], torch.tensor(kept)] = mask(lam[:, :, kept], "key", False)
        masks.append(m)
    expected = formula(q, k, v, sum(masks) / 2)
    torch.testing.assert_close(found[:, :, real[0]], expected[:, :, real[0]], **TOLERANCE)
    packed = mechanism(
        *(t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (q, k, v)), x=x.flatten(0, 1).unsqueeze(0),
        spatial_shape=(3, 4), cu_seqlens=torch.tensor([0, 12, 24]),
    )  # fmt: skip
    torch.testing.assert_close(packed.unflatten(2, (2, 12))[0].transpose(0, 1), whole, **TOLERANCE)


def test_snake_turns_the_numerator_alone():
    q, k, v = draw(length=12)
    x = draw_x(12)
    mechanism = build(order="snake")
    flip = torch.ones(12, 1, dtype=torch.float64)
    flip[3] = -1
    m = (plane_mask(mechanism, x, BY_ROWS, 0) + plane_mask(mechanism, x, BY_COLUMNS, 1)) / 2
    w = torch.einsum("bhtd,bhsd,bhtsd->bhts", phi(q), per_query_head(phi(k), 4), per_query_head(m, 4))
    expected = (w * flip.T) @ per_query_head(v, 4) / (w.sum(-1, keepdim=True) + 1e-6)
    found = mechanism(q, k, v, x=x, spatial_shape=(3, 4), rotate=lambda a, b: (a, b * flip))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_prefix_tokens_do_not_decay():
    q, k, v = draw()
    x = draw_x()
    mechanism = build(num_prefix_tokens=2)
    decay = lambdas(mechanism.decays[0], x).clone()
    decay[:, :, :2] = 1
    torch.testing.assert_close(mechanism(q, k, v, x=x), formula(q, k, v, mask(decay, "key", False)), **TOLERANCE)


def test_x_is_asked_for_by_selective_decays_alone():
    q, k, v = draw()
    real = torch.ones(2, 11, dtype=torch.bool)
    assert build(decay="fixed")(q, k, v, key_mask=real).shape == q.shape
    assert not build(decay="none").info.uses_input
    with pytest.raises(ValueError, match="takes its gates from x"):
        build()(q, k, v)


@pytest.mark.parametrize("options", [DECAYS[0], DECAYS[1], DECAYS[4]], ids=str)
def test_contracts_of_the_other_decays(options):
    declares = {"uses_input": options["decay"] == "selective"}
    contracts = ["forms", "causality", "padding", "hand_over", "gradients", "scaling"]
    assert check_mechanism("lion", contracts, declares=declares, **options)


@pytest.mark.parametrize("shape", [None, (3, 3), (12,), (0, 12)])
def test_bad_plane(shape):
    q, k, v = draw(length=12)
    with pytest.raises(ValueError, match="spatial_shape"):
        build(order="snake")(q, k, v, x=draw_x(12), spatial_shape=shape)
