"""Plans: what each method is, what is refused, and that a plan survives being written as JSON."""

import json

import pytest

from linattn.convert.plan import METHODS, LayerPlan, LayerShape, Plan, plan

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=16, hidden=64, causal=True)
BOTH_WAYS = SHAPE._replace(num_kv_heads=4, causal=False)
OPTIONS = {"features": {"mechanism": "mirror"}, "dof": {"feature_dim": {0: 16, 2: 48}}, "still": {"cap": 64}}


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_survives_json(method):
    made = plan(method, [SHAPE] * 3, layers=[0, 2], **OPTIONS.get(method, {}))
    assert sorted(made.layers) == [0, 2]
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_stored_plan_means_what_it_meant_when_defaults_of_a_method_change():
    """Fields left out of a file are those of a layer's plan, whatever the method says today."""
    layer = {"kind": "hybrid", "window": 16, "ratio": 0.0625, "linear_weight": 0.1}
    stored = Plan.from_dict({"method": "still", "layers": {"0": layer}})
    assert (stored.layers[0].units, stored.layers[0].sinks, stored.layers[0].layout) == ("row_max", 4, "chunks")
    assert (stored.layers[0].score, stored.layers[0].reduce) == ("log_prob", "mean")
    assert plan("still", [SHAPE], window=16).to_dict()["layers"]["0"] == layer | {"units": "one"}


def test_the_methods_are_those_of_their_papers():
    still = plan("still", [SHAPE]).layers[0]
    assert (still.features, still.window, still.layout, still.delay, still.ratio) == ("np", 64, "chunks", 1, 1 / 16)
    assert still.budget.sinks == 4
    assert still.budget.per_chunk == 4
    assert (still.linear_weight, still.units) == (0.1, "one")
    assert plan("still", [SHAPE], units="row_max").layers[0].units == "row_max"
    assert plan("still", [SHAPE], linear_weight=None).layers[0].linear_weight is None
    assert plan("still", [SHAPE], features="none").layers[0].linear_weight is None  # nothing to weigh
    short = plan("still", [SHAPE], window=8, score="kl", reduce="max").layers[0].budget
    assert (short.per_chunk, short.score, short.reduce) == (1, "kl", "max")
    lolcats = plan("lolcats", [SHAPE]).layers[0]
    assert (lolcats.features, lolcats.feature_dim, lolcats.budget) == ("hedgehog", 8, None)
    assert lolcats.linear_weight == pytest.approx(10)  # a window of 0.1 beside a linear part of 1
    assert lolcats.units == "row_max"
    assert plan("hedgehog", [BOTH_WAYS]).layers[0].window == 0
    dof = plan("dof", [SHAPE] * 2, feature_dim={0: 16, 1: 40}, window=32)
    assert [dof.layers[i].feature_dim for i in (0, 1)] == [16, 40]
    assert dof.layers[0].units == "one"
    mirror = plan("features", [SHAPE, BOTH_WAYS], mechanism="mirror")
    assert [mirror.layers[i].options["cross_head"] for i in (0, 1)] == [False, True]
    assert mirror.layers[0].options["reflections"] == 2


@pytest.mark.parametrize(
    ("message", "ask"),
    [
        ("bidirectional", lambda: plan("still", [BOTH_WAYS])),
        ("bidirectional", lambda: plan("dof", [BOTH_WAYS], window=8)),
        ("needs mechanism", lambda: plan("features", [SHAPE])),
        ("method", lambda: plan("magic", [SHAPE])),
        ("from 0 to 0", lambda: plan("still", [SHAPE], layers=[1])),
        ("none for layer 1", lambda: plan("dof", [SHAPE] * 2, feature_dim={0: 8})),
        ("wndow is no option of method 'still'; it takes .*window", lambda: plan("still", [SHAPE], wndow=8)),
        ("feature_dim", lambda: LayerPlan("hybrid", feature_dim=0)),
        ("units='one'", lambda: LayerPlan("hybrid", features="prf")),
        ("window > 0", lambda: LayerPlan("hybrid", window=0, ratio=0.1)),
        ("nothing would be seen", lambda: LayerPlan("hybrid", window=0, features="none")),
        ("needs both", lambda: LayerPlan("hybrid", window=0, linear_weight=2.0)),
        ("rank tokens that stay exact: they need a ratio > 0", lambda: plan("still", [SHAPE], ratio=0.0, reduce="max")),
        ("layers must be a list", lambda: plan("still", [SHAPE], layers=[0, 0])),
        ("layers must be a list", lambda: plan("still", [SHAPE], layers=[])),
        ("layers must be a list", lambda: plan("still", [SHAPE], layers="0")),
        ("kind='mechanism'", lambda: LayerPlan("hybrid", mechanism="elu")),
        ("mechanism must be", lambda: LayerPlan("mechanism", mechanism="nothing")),
        ("num_heads is as the model", lambda: plan("features", [SHAPE], mechanism="elu", num_heads=2)),
    ],
)
def test_what_does_not_fit_is_refused(message, ask):
    with pytest.raises(ValueError, match=message):
        ask()
