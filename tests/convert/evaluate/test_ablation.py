import pytest
import torch
from tests.convert.evaluate.tiny import tiny_llama

from linattn.convert.convert import convert, linearized_layers, plan_model
from linattn.convert.evaluate.evaluator import (
    FULL,
    NO_LINEAR,
    NO_SALIENT,
    WINDOW,
    ablated,
    needle_worth,
    part_worth,
    variants,
)
from linattn.convert.evaluate.measures import gain


def converted(method, **options):
    model = tiny_llama()
    convert(model, plan_model(model, method, **options))
    return model


def test_each_variant_is_another_model_and_the_window_alone_forgets_what_is_far():
    still = converted("still", window=8, ratio=0.25, sinks=1)
    torch.manual_seed(0)
    ids = torch.randint(256, (1, 64))
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % 256  # far from the end, in every layer
    assert variants(still) == [FULL, NO_LINEAR, NO_SALIENT, WINDOW]
    logits, same = [], {}
    for name in variants(still):
        with torch.no_grad(), ablated(still, name):
            here, there = still(ids).logits[0, -1], still(changed).logits[0, -1]
        logits.append(here)
        same[name] = torch.equal(here, there)
    assert all((a - b).abs().max() > 1e-6 for i, a in enumerate(logits) for b in logits[:i])
    assert same[WINDOW]
    assert not same[FULL]
    assert not same[NO_SALIENT]
    with pytest.raises(RuntimeError), ablated(still, NO_LINEAR):
        raise RuntimeError
    assert not any(layer.core.zero_linear or layer.core.zero_salient for layer in linearized_layers(still).values())


def test_only_what_is_there_can_be_switched_off():
    assert variants(converted("lolcats", window=8)) == [FULL, NO_LINEAR]
    assert variants(converted("still", window=8, features="none")) == [FULL, NO_SALIENT]
    assert variants(converted("hedgehog")) == [FULL]
    assert variants(converted("features", mechanism="elu")) == [FULL]


def needles(share, count, haystack="noise", depth=0.0):
    sums = {"found": share, "tokens_right": 0.0, "nats": 0.0}
    return {"length": 64, "depth": depth, "count": count, "haystack": haystack, **sums}


def test_a_part_counts_if_it_adds_more_than_chance():
    windows = [(7.0 + i, 7) for i in range(10)]
    worse = [(nats + 0.7 + 0.01 * i, 7) for i, (nats, _) in enumerate(windows)]
    noisy = [(nats + (3.0 if i % 2 else -2.8), 7) for i, (nats, _) in enumerate(windows)]
    linear, window = (part_worth("perplexity", 8, "a part", *gain(own, windows)) for own in (worse, noisy))
    assert (linear["counts"], window["counts"]) == (True, False)
    assert linear["gain"] == pytest.approx(0.745 / 7)
    strong, weak = (needle_worth("a part", [needles(1.0, n)], [needles(0.5, n)])[0] for n in (40, 2))
    assert (strong["gain"], strong["counts"], weak["counts"]) == (0.5, True, False)
    assert not needle_worth("a part", [needles(1.0, 4)], [needles(1.0, 4)])[0]["counts"]


def test_retrieval_from_each_haystack_counts_alone():
    def rows(**shares):
        return [needles(share, 20, name, depth) for name, share in shares.items() for depth in (0.0, 1.0)]

    noise, text = needle_worth("a part", rows(noise=0.25, text=1.0), rows(noise=0.75, text=0.5))
    assert (noise["haystack"], noise["gain"], noise["counts"]) == ("noise", -0.5, False)
    assert (text["haystack"], text["gain"], text["counts"]) == ("text", 0.5, True)
    assert noise["error"] == pytest.approx((2 * 0.25 * 0.75 / 40) ** 0.5)
    assert text["error"] == pytest.approx(((0.5 / 40 + 0.25) / 40) ** 0.5)
