"""Features without their zeros: the same numbers as with them."""

import pytest
import torch
from torch import nn

from linattn.models.graph import Graph, create_graph_model
from linattn.models.graph.graph import Nonzero, apply_linear, find_nonzero
from linattn.models.graph.split_layers import Bounded, InputMap, Signature
from models.graph.graphs import CHANNELS, close, dense_adjacency, random_graph

WORDS, NODES = 40, 12


def bags():
    """A tenth of the numbers, one row without any."""
    x = torch.randn(NODES, WORDS) * (torch.rand(NODES, WORDS) < 0.1)
    x[3] = 0
    return x


@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_those_of_all_numbers(bias):
    x, linear = bags(), nn.Linear(WORDS, 5, bias=bias)
    found = find_nonzero(x)
    assert isinstance(found, Nonzero)
    weights = torch.randn(NODES, 5)
    gradients = []
    for form in (x, found):
        y = apply_linear(linear, form)
        close(y, linear(x))
        gradients.append(torch.autograd.grad((y * weights).sum(), list(linear.parameters())))
    for first, second in zip(*gradients, strict=True):
        close(first, second)


def test_dropout_leaves_zeros_alone_and_keeps_the_mean():
    graph = Graph((torch.rand(200, WORDS) < 0.1).to(torch.get_default_dtype()), torch.zeros(2, 0, dtype=torch.int64))
    values = graph.features(0.25, training=True).values
    assert values.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs(float(values.mean()) - 1) < 0.1
    assert graph.features(0.25, training=False) is graph.features()


def test_full_features_stay_as_they_are():
    x = torch.randn(NODES, WORDS)
    assert find_nonzero(x) is None
    assert find_nonzero(bags().requires_grad_()) is None  # else they would get no gradient
    assert Graph(x, torch.zeros(2, 0, dtype=torch.int64)).features() is x


@pytest.mark.parametrize("name", ["gcn", "sgc", "sgformer", "pseudo_riemannian"])
def test_models_give_the_same_logits(name):
    data = random_graph(NODES)
    data.x = bags()
    model = create_graph_model(name, in_channels=WORDS, hidden=8, out_channels=3).eval()
    found = model(data)
    data.x = bags().copy_(data.x).requires_grad_()
    close(found, model(data))


def test_input_is_averaged_over_neighbours_as_often_as_asked():
    data = random_graph(NODES)
    twice, plain = (
        InputMap(CHANNELS, Signature(4, 4), kind, 0, "exponential", hops=2) for kind in ("normalized", "linear")
    )
    plain.load_state_dict(twice.state_dict())
    graph, a = Graph(data.x, data.edge_index), dense_adjacency(data)
    close(twice(data.x, graph, 1.0).joined(), plain(a @ a @ data.x, graph, 1.0).joined())


def test_bounded_vectors_keep_direction_and_are_shorter_than_one():
    v = torch.randn(50, 6) * torch.logspace(-4, 4, 50)[:, None]
    found = Bounded()(v)
    length = found.norm(dim=1)
    assert bool((length < 1).all())
    close(found / length[:, None], v / v.norm(dim=1, keepdim=True))
    close(length, v.norm(dim=1) / (1 + v.norm(dim=1) ** 2).sqrt())
