"""The relatives in flat space, against small formulas with full matrices, one graph at a time."""

import torch
from torch import nn

from linattn.models.graph import create_graph_model
from models.graph.graphs import CHANNELS, close, dense_adjacency, random_graph

HIDDEN, CLASSES, NODES = 8, 3, 9


def build(name, **options):
    """In evaluation, so that dropout is out, with biases that are not 0."""
    model = create_graph_model(name, in_channels=CHANNELS, hidden=HIDDEN, out_channels=CLASSES, **options).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)
    return model


def convolve(layer, a, x):
    return a @ x @ layer.weight.weight.T + layer.bias


def test_gcn():
    data, model = random_graph(NODES), build("gcn", num_layers=3)
    a, x = dense_adjacency(data), data.x
    for layer in model.stack.layers:
        x = convolve(layer, a, x).relu()
    close(model(data), convolve(model.last, a, x))


def test_sgc_is_two_hops_of_a_linear_model():
    data, model = random_graph(NODES), build("sgc")
    a = dense_adjacency(data)
    close(model(data), convolve(model.convolution, a @ a, data.x))


def test_weights_of_edges_count():
    data = random_graph(NODES)
    model = build("sgc", hops=1)
    data.edge_weight = torch.rand(data.edge_index.shape[1])
    a = torch.zeros(NODES, NODES)
    for (source, target), weight in zip(data.edge_index.T.tolist(), data.edge_weight.tolist(), strict=True):
        a[target, source] = weight
    a.fill_diagonal_(1)
    root = a.sum(1).rsqrt()
    close(model(data), convolve(model.convolution, root[:, None] * a * root, data.x))


def attention_branch(model, data, attend):
    """The frame: input, blocks ``alpha o + (1 - alpha) x``, convolutions, merge, head."""
    x = model.input_norm(model.input(data.x)).relu()
    a = dense_adjacency(data)
    for block in model.blocks:
        qkv = block.qkv(x).reshape(NODES, 3, block.num_heads, HIDDEN)
        q, k, v = qkv.unbind(1)
        q, k = q / q.norm(), k / k.norm()  # Frobenius, over all heads
        heads = [attend(q[:, h], k[:, h], v[:, h], a) for h in range(block.num_heads)]
        x = block.norm(0.5 * sum(heads) / len(heads) + 0.5 * x)
    if model.convolutions is not None:
        near = data.x
        for layer in model.convolutions.layers:
            near = convolve(layer, a, near).relu()
        x = model.graph_weight * model.graph_norm(near) + (1 - model.graph_weight) * x
    return model.head(x)


def test_sgformer():
    def attend(q, k, v, a):
        scores = q @ k.T
        return (NODES * v + scores @ v) / (NODES + scores.sum(1, keepdim=True))

    data, model = random_graph(NODES), build("sgformer", num_layers=2, num_heads=2)
    close(model(data), attention_branch(model, data, attend))


def test_difformer():
    def attend(q, k, v, a):
        scores = 1 + q @ k.T
        return scores / scores.sum(1, keepdim=True) @ v + a @ v

    data, model = random_graph(NODES), build("difformer", num_heads=2)
    assert model.convolutions is None
    close(model(data), attention_branch(model, data, attend))


def test_polynormer():
    data, model = random_graph(NODES), build("polynormer", num_heads=2, graph_layers=0)
    x = model.input_norm(model.input(data.x)).relu()
    (block,) = model.blocks
    out = []
    for h in (slice(0, 4), slice(4, 8)):
        features = block.q(x)[:, h].sigmoid()
        weights = features @ features.T
        out.append(weights @ block.v(x)[:, h] / (weights.sum(1, keepdim=True) + 1e-6))
    x = block.out(block.norm(torch.cat(out, 1)) * (block.h(x) + block.beta.sigmoid())).relu()
    close(model(data), model.head(x))
