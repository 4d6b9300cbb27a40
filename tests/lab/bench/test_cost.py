import pytest
from torch import nn

from linattn.lab.bench.cost import model_cost
from linattn.models.vision import VisionTransformer

WIDTH, HEADS, HEAD_DIM, DEPTH, CLASSES = 24, 3, 8, 2, 7


def vit(mechanism, **options):
    shape = {"embed_dim": WIDTH, "num_heads": HEADS, "depth": DEPTH, "num_classes": CLASSES}
    return VisionTransformer(mechanism, img_size=(12, 8), patch_size=4, in_chans=3, **shape | options)


def by_hand(tokens, patches):
    """Multiply-adds twice: patches, then per block q k v, output and both halves of the feed-forward part, the head."""
    per_token = 3 * WIDTH**2 + WIDTH**2 + 2 * 4 * WIDTH**2
    return 2 * (patches * 3 * 16 * WIDTH + DEPTH * tokens * per_token + WIDTH * CLASSES)


T = 7  # 3 x 2 patches and the class token
ATTENTION = {
    # Scores and weighted sum.
    "softmax": HEADS * 2 * (T * T * HEAD_DIM + T * T * HEAD_DIM),
    # The state written and read, values and denominator.
    "relu": HEADS * 2 * (T * HEAD_DIM * (HEAD_DIM + 1)) * 2,
    # Two flows of twice the features, each with half of the values and a denominator.
    "pola": HEADS * 2 * (2 * T * 2 * HEAD_DIM * (HEAD_DIM // 2 + 1)) * 2,
}
STATE = {
    "softmax": HEADS * 2 * T * HEAD_DIM,
    "relu": HEADS * HEAD_DIM * (HEAD_DIM + 1),
    "pola": HEADS * 2 * 2 * HEAD_DIM * (HEAD_DIM // 2 + 1),
}


@pytest.mark.parametrize("name", ["softmax", "relu", "pola"])
def test_cost_of_a_vit_by_hand(name):
    cost = model_cost(vit(name), (12, 8), 3)
    assert cost.attention_flops == DEPTH * ATTENTION[name]
    assert cost.flops == by_hand(T, patches=6) + DEPTH * ATTENTION[name]
    assert cost.state_size == STATE[name]
    learned = 2 * HEADS * HEAD_DIM if name == "pola" else 0  # a power and a scale per channel
    assert cost.mechanism_parameters == DEPTH * learned
    assert cost.parameters == model_cost(vit("softmax"), (12, 8), 3).parameters + DEPTH * learned


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ["softmax", "relu", "hedgehog"])
def test_what_the_counter_sees_inside_a_mechanism_counts_once(name, impl):
    """The reference form is made of plain products, hedgehog has learned maps: the counter sees these, and more."""
    plain = vit("softmax")
    counted = model_cost(vit(name, attention={"impl": impl}), (12, 8), 3)
    mechanism = vit(name).blocks[0].attn.mechanism
    assert counted.flops - DEPTH * mechanism.flops(T) == by_hand(T, patches=6)
    assert counted.parameters - counted.mechanism_parameters == sum(p.numel() for p in plain.parameters())


def test_convolutions_and_gates_by_hand():
    """Depthwise 5 x 5 over the values, 3 x 3 before the attention and in the feed-forward part, a linear gate."""
    parts = {"attention": {"local": "channel", "gate": "linear"}, "cpe": 1, "mlp_conv": True, "global_pool": "avg"}
    cost = model_cost(vit("relu", **parts), (12, 8), 3)
    patches = 6
    attention = HEADS * 2 * (patches * HEAD_DIM * (HEAD_DIM + 1)) * 2
    own = patches * (25 * WIDTH + 9 * WIDTH + 9 * 4 * WIDTH + WIDTH**2)
    assert cost.flops == by_hand(patches, patches) + DEPTH * (2 * own + attention)


def test_a_mechanism_without_a_state_has_none():
    assert model_cost(vit("agent"), (12, 8), 3).state_size is None


def test_a_model_without_mechanisms_is_counted_too():
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
    cost = model_cost(model, 4, 3)
    assert (cost.parameters, cost.flops, cost.attention_flops, cost.state_size) == (490, 960, 0, None)


def test_fewer_keys_than_queries_are_refused():
    model = vit("relu", global_pool="avg", attention={"spatial_reduction": 2})
    with pytest.raises(ValueError, match="as many keys as queries, got 2 and 6"):
        model_cost(model, (12, 8), 3)
    assert not model.blocks[0].attn.mechanism._forward_pre_hooks
