"""What holds for every mechanism and its options, beside the contracts, which know the defaults alone."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linattn import create_mechanism, list_mechanisms, mechanism_info
from mechanisms.formulas import draw

HEADS, KV_HEADS, LENGTH = 4, 2, 11
BIDIRECTIONAL = list_mechanisms(bidirectional=True)
OTHERS = [
    ("gated", {"gate": "head"}), ("taylor", {"feature_dim": None}), ("quadratic", {"form": "exact"}),
    ("quadratic", {"form": "normalized"}), ("quadratic", {"linear_term": True}),
]  # fmt: skip
FLOPS = [
    *((name, {}) for name in ("angular", "cosformer", "efficient", "elu", "focused", "gated", "hedgehog", "inline",
                              "mala", "nala", "performer", "pola", "pola_plus", "quadratic", "rala", "relu",
                              "retention", "taylor")), ("agent", {"num_agents": 9}), *OTHERS,
]  # fmt: skip


def build(name: str, **options):
    torch.manual_seed(0)
    own = {"num_kv_heads": HEADS} if name == "mirror" else {"num_kv_heads": KV_HEADS}
    return create_mechanism(name, **{"num_heads": HEADS, "head_dim": 6} | own | options)


def inputs(name: str, length: int = LENGTH) -> dict[str, Tensor]:
    q, k, v = draw(kv_heads=HEADS if name == "mirror" else KV_HEADS, length=length)
    x = torch.randn(2, length, 24, dtype=q.dtype, generator=torch.Generator().manual_seed(5))
    return {"q": q, "k": k, "v": v} | ({"x": x} if mechanism_info(name).uses_input else {})


@pytest.mark.parametrize(("name", "options"), OTHERS, ids=str)
@pytest.mark.parametrize("length", [1, LENGTH])
def test_state_size(name, options, length):
    mechanism = build(name, causal=True, **options).double()
    _, state = mechanism.with_state(**inputs(name, length))
    assert mechanism.state_size(length) * 2 == sum(part.numel() for part in state)  # a batch of two


@pytest.mark.parametrize(("name", "options"), FLOPS, ids=str)
def test_flops(name, options):
    """Counted: the products of its own maps, the sum over keys and the read of every query, with denominators."""
    mechanism = build(name, **options)
    flows, width = (2, 3) if name.startswith("pola") else (1, 6)  # two flows, each over half of the values
    heads, kv_heads = flows * HEADS, flows * (HEADS if name == "agent" else KV_HEADS)
    phi, psi = (torch.randn(h, LENGTH, mechanism.num_features) for h in (heads, kv_heads))
    with FlopCounterMode(display=False) as counted:
        state = psi.mT @ torch.randn(kv_heads, LENGTH, width + 1)
        phi @ state.repeat_interleave(heads // kv_heads, dim=0)
    q, k, v, *x = (t[:1].float() for t in inputs(name).values())
    with FlopCounterMode(display=False) as own:
        if name == "performer":
            mechanism.log_features(q), mechanism.log_features(k)
        elif name == "agent":
            agents = phi.mT @ torch.randn(heads, LENGTH, 6)
            for t in (phi, psi):
                t.new_empty(heads, LENGTH, 6) @ agents.mT
        elif name in ("gated", "hedgehog", "taylor"):
            mechanism.arguments(q, k, v, x=x[0] if x else None)
    sweeps = 2 if name in ("gated", "retention") else 1  # a bidirectional decay goes both ways
    assert mechanism.flops(LENGTH) == own.get_total_flops() + sweeps * counted.get_total_flops()
    if mechanism_info(name).causal:
        assert build(name, causal=True, **options).flops(LENGTH) == own.get_total_flops() + counted.get_total_flops()


def test_flops_of_softmax():
    with FlopCounterMode(display=False) as counted:
        build("softmax", impl="reference")(*(t[:1] for t in inputs("softmax").values()))
    assert build("softmax").flops(LENGTH) == counted.get_total_flops()
    pairs = sum(t + 1 for t in range(LENGTH))
    assert build("softmax", causal=True).flops(LENGTH) * LENGTH**2 == counted.get_total_flops() * pairs


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("hydra", {"causal": True}, 9 * 6 * 2 * 6),
        ("lion", {}, 9 * (2 * 6 * 2 * 6 * 7 + 2 * 24 * 2)),
        ("lion", {"order": "snake"}, 9 * (4 * 6 * 2 * 6 * 7 + 2 * 2 * 24 * 2)),
        ("lion", {"causal": True}, 9 * (6 * 2 * 6 * 7 + 2 * 24 * 2)),
        ("mirror", {"reflections": 2}, 9 * (8 * 2 * 6 * 7 + 2 * 2 * (2 * 24 + 2 * 24) + 2 * 2 * 12 * 2 * 4)),
        ("mlstm", {"causal": True}, 9 * (6 * 2 * 6 * 7 + 2 * 2 * 24 * 2)),
        ("mlstm", {}, 9 * (2 * 6 * 2 * 6 * 7 + 2 * 2 * 24 * 2)),
        ("window", {"causal": True, "window": 5}, 9 * 4 * 4 * 6 * 5),
        ("zeros", {"causal": True}, 9 * (3 * 6 * 2 * 36 + 2 * 24 * (12 + 8))),
        ("zeros", {}, 9 * (2 * 6 * 2 * 36 + 2 * 24 * (12 + 8))),
        ("zeros", {"zero_order": "tanh"}, 9 * (3 * 6 * 2 * 36 + 2 * 24 * (12 + 12))),
        ("zeros_softmax", {}, 4 * 4 * 6 * 81 + 9 * (6 * 2 * 7 * 6 + 2 * 24 * 12)),
    ],
    ids=str,
)
def test_flops_by_hand(name, options, expected):
    assert build(name, **options).flops(9) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in BIDIRECTIONAL), *OTHERS], ids=str)
def test_precisions(name, options, dtype):
    """Inputs of that precision, autocast, and both; the contract of precision knows no autocast."""
    exact_inputs, mechanism = inputs(name), build(name, **options).double()
    exact = mechanism(**exact_inputs)
    rounded = {key: t.to(dtype) for key, t in exact_inputs.items()}
    plain = mechanism.to(dtype)(**rounded)
    mechanism.float()
    with torch.autocast("cpu", dtype=dtype):
        mixed, both = mechanism(**{key: t.float() for key, t in exact_inputs.items()}), mechanism(**rounded)
    for found in (plain, mixed, both):
        assert found.dtype == dtype
        # inputs carry 8 bits (2^-9 relative each) or 11; third powers and exponents of a few units multiply that
        assert (found.double() - exact).abs().max() < (0.05 if dtype == torch.bfloat16 else 0.01) * exact.abs().max()


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_one_graph_serves_all_lengths(name):
    """Compiled once with lengths left open: an eps of a mean, for one, depends on the number of keys."""
    mechanism = build(name).double()
    torch.compiler.reset()
    # What a length left open breaks, it breaks in the first of the tracers; one mechanism goes through the second too.
    backend = "aot_eager" if name == "focused" else "eager"
    compiled = torch.compile(mechanism, fullgraph=True, dynamic=True, backend=backend)
    for length in (11, 17):
        given = inputs(name, length) | {"key_mask": torch.arange(length).expand(2, -1) < 9}
        torch.testing.assert_close(compiled(**given), mechanism(**given), rtol=1e-10, atol=1e-12)
    torch.compiler.reset()


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_a_query_that_sees_no_key_gives_zero(name):
    given, mechanism = {key: t.requires_grad_() for key, t in inputs(name).items()}, build(name).double()
    out = mechanism(**given, key_mask=torch.arange(11) < torch.tensor([[5], [0]]))
    assert not out[1].any()
    assert out[0].any()
    gradients = torch.autograd.grad(out.square().sum(), (*given.values(), *mechanism.parameters()), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("name", [n for n in BIDIRECTIONAL if not mechanism_info(n).cls.rotates])
def test_nothing_to_rotate(name):
    with pytest.raises(ValueError, match=f"mechanism '{name}' has no features that rotate could turn"):
        build(name).double()(**inputs(name), rotate=lambda q, k: (q, k))


POSITIVE = (0, -1.0, math.inf, math.nan, "3", True)
WRONG = [
    ("agent", {"num_agents": (0, -1, 2.0, True, None)}, "must be an integer >= 1"),
    ("angular", {"output_norm": ("l1",)}, "must be one of 'l2', 'sum', got 'l1'"),
    ("cosformer", {"max_length": (0, 2.5, True)}, "must be an integer >= 1"),
    ("focused", {"power": POSITIVE}, "must be a finite number > 0"),
    ("gated", {"gate": ("token",)}, "must be one of 'channel', 'head', got 'token'"),
    ("lion", {"decay": ("some",)}, "must be one of 'none', 'fixed', 'selective', got 'some'"),
    ("lion", {"decay_per": ("token",)}, "must be one of 'head', 'channel'"),
    ("lion", {"decay_index": ("both",)}, "must be one of 'key', 'query', None"),
    ("lion", {"features": ("relu",)}, "must be one of 'silu', 'elu', 'sigmoid', 'identity'"),
    ("lion", {"normalizer": ("abs_max_one",)}, "must be one of 'sum', None"),
    ("lion", {"order": ("spiral",)}, "must be one of 'line', 'snake'"),
    ("lion", {"num_prefix_tokens": (-1, True)}, "must be an integer >= 0"),
    ("mirror", {"modulation": ("batch",)}, "must be one of 'sequence', 'token', 'none', None, got 'batch'"),
    ("mirror", {"reflections": (3,)}, "must be one of 1, 2, got 3"),
    ("mirror", {"cross_head": ("yes",)}, "must be True or False"),
    ("mirror", {"head_dim": (5,)}, "must be even"),
    ("mlstm", {"input_gate": ("tanh",)}, "must be one of 'exponential', 'sigmoid', got 'tanh'"),
    ("mlstm", {"normalize": ("yes",)}, "must be True or False, got 'yes'"),
    ("mlstm", {"input_bias": ("low", math.nan)}, "must be a finite number"),
    ("mlstm", {"soft_cap": POSITIVE}, "must be a finite number > 0"),
    ("nala", {"power": POSITIVE, "tau": POSITIVE}, "must be a finite number > 0"),
    ("nala", {"angle": ("soft",)}, "must be one of 'hard', 'direction', 'raw', 'scaled', got 'soft'"),
    ("performer", {"num_features": (0, 1.5, "many")}, "must be an integer >= 1"),
    ("pola", {"alpha": (*POSITIVE, None)}, "must be a finite number > 0"),
    ("pola", {"head_dim": (5,)}, "must be even, each flow takes one half of v, got 5"),
    ("pola_plus", {"head_dim": (5,)}, "must be even, each flow takes one half of v, got 5"),
    ("quadratic", {"form": ("cubic",)}, "must be one of 'compact', 'exact', 'normalized', got 'cubic'"),
    ("quadratic", {"linear_term": (1,)}, "must be True or False, got 1"),
    ("relu", {"eps": (0.0, 1e-31, math.inf, math.nan, "small", True)}, "must be a finite number >= 1e-30"),
    ("retention", {"normalizer": ("sum", 1)}, "must be one of None, 'abs_max_one'"),
    ("softmax", {"scale": (0, -1.0, "half")}, "must be a finite number > 0"),
    ("softmax", {"impl": ("recurrent", "chunked")}, "must be one of 'auto', 'reference'"),
    ("taylor", {"feature_dim": (0, 2.5)}, "must be an integer >= 1"),
    ("window", {"window": (0, 2.5)}, "must be an integer >= 1"),
    ("window", {"scale": (-1,)}, "must be a finite number > 0"),
    ("zeros", {"logit": ("max",)}, "must be one of 'deviation', 'quadratic', 'mean', 'l1', 'rms', got 'max'"),
    ("zeros", {"zero_order": (True,)}, "must be one of None, 'tanh', 'sigmoid', got True"),
    ("zeros", {"head_norm": (None,)}, "must be True or False, got None"),
    ("zeros_softmax", {"gate": ("tanh",)}, "must be one of 'unit', 'sigmoid', got 'tanh'"),
    ("zeros_softmax", {"zero_order": (-1, "on", True, math.inf)}, "must be a finite number >= 0"),
    ("zeros_softmax", {"impl": ("chunked",)}, "must be one of 'auto', 'reference', got 'chunked'"),
]


@pytest.mark.parametrize(("name", "options", "words"), WRONG, ids=str)
def test_bad_options(name, options, words):
    for option, values in options.items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=f"{option} {words}"):
                create_mechanism(name, **{"num_heads": 2, "head_dim": 4, option: value, "causal": name == "window"})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lion", {"features": "identity"}, "normalizer='sum' divides by a sum"),
        ("lion", {"order": "snake", "decay": "none"}, "order='snake' is an order of decays"),
        ("lion", {"order": "snake", "causal": True}, "order='snake' needs causal=False"),
        ("lion", {"num_prefix_tokens": 1, "causal": True}, "num_prefix_tokens > 0 needs causal=False"),
        ("mirror", {"modulation": "sequence", "causal": True}, "with causal=True use 'token' or 'none'"),
        ("mirror", {"num_kv_heads": 1}, "2 heads and 1 kv heads: pass cross_head=False"),
        ("mlstm", {"normalize": False}, "normalize=False needs input_gate='sigmoid'"),
        ("quadratic", {"form": "exact", "linear_term": True}, 'linear_term is an option of form="compact"'),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(name, options, words):
    with pytest.raises(ValueError, match=words):
        create_mechanism(name, **{"num_heads": 2, "head_dim": 4} | options)
