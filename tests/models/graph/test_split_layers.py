"""Layers on the pseudo-hyperboloid: they stay on it, and are what their formulas say."""

import pytest
import torch
from torch import nn

import linattn
from linattn.models.graph import SplitAttention, read_graph
from linattn.models.graph.manifold import midpoint
from linattn.models.graph.split_attention import TransformerBlock
from linattn.models.graph.split_layers import (
    ConvolutionBlock,
    Curvature,
    InputMap,
    Signature,
    SplitActivation,
    SplitDropout,
    SplitLinear,
    SplitNorm,
    aggregate,
    check_signature,
)
from models.graph.graphs import (
    CHANNELS,
    SIGNATURES,
    check_on_manifold,
    close,
    dense_adjacency,
    random_graph,
    random_points,
    side_by_side,
)

spaces = pytest.mark.parametrize("signature", SIGNATURES, ids=str)
RADIUS = 1.3


def elu_attention(q, k, v):
    """Linear attention of one head with elu(x) + 1 and an eps of 1e-6, written with the full matrix of weights."""
    weights = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).T
    return weights @ v / (weights.sum(1, keepdim=True) + 1e-6)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


@spaces
def test_every_layer_stays_on_the_manifold(signature):
    own = Signature(*signature)
    graph = read_graph(random_graph(9))
    x = random_points(signature, 9, RADIUS)
    attention = SplitAttention(own, 2, "elu", combine="concat", temperature=True, value_path=True)
    layers = {
        "linear": SplitLinear(own, own),
        "wider": SplitLinear(own, own.grown()),
        "other": SplitLinear(own, Signature(2, 3)),
        "norm": SplitNorm(own),
        "tanh": SplitActivation("tanh"),
        "relu": SplitActivation("relu"),
        "dropout": SplitDropout(0.9, 0.9),  # some points lose the whole sphere part
        "aggregate": lambda x: aggregate(x, graph),
        "attention": lambda x: attention(x, graph),
    }
    for kind in ("transport", "midpoint", None):
        block = TransformerBlock(SplitAttention(own), kind, "tanh", (0.5, 0.5), True)
        layers[f"block {kind}"] = lambda x, block=block: block(x, graph)
    convolution = ConvolutionBlock(own, own, "relu", (0.5, 0.5))
    layers["convolution"] = lambda x: convolution(x, graph)
    for name, layer in layers.items():
        after = {"wider": own.grown(), "other": Signature(2, 3)}.get(name, own)
        y = layer(x)
        assert (y.q, y.p) == after, name
        check_on_manifold(y, RADIUS)
    for degrees, kind in ((0, "linear"), (3, "convolution")):
        check_on_manifold(InputMap(CHANNELS, own, kind, degrees, "exponential")(graph.x, graph, RADIUS), RADIUS)


def test_linear_sees_the_height_of_the_hyperboloid():
    x = random_points((2, 3), 7, RADIUS)
    layer = SplitLinear(Signature(2, 3), Signature(1, 4), groups=2)
    y = layer(x)
    assert y.sphere.shape == (7, 2, 2)
    height = (x.space.square().sum(1, keepdim=True) + RADIUS**2).sqrt()
    for group in range(2):
        rows = slice(2 * group, 2 * group + 2)
        free = x.sphere @ layer.sphere.weight[rows].T + layer.sphere.bias[rows]
        close(y.sphere[:, group], RADIUS * unit(free))
        rows = slice(4 * group, 4 * group + 4)
        close(y.space[:, group], torch.cat([height, x.space], 1) @ layer.space.weight[rows].T + layer.space.bias[rows])


def test_parts_too_narrow_for_a_norm_are_left():
    x = random_points((1, 2), 7)
    y = SplitNorm(Signature(1, 2))(x)
    assert torch.equal(y.space, x.space)
    close(y.sphere, x.sphere)
    wide = random_points((2, 3), 7)
    close(SplitNorm(Signature(2, 3))(wide).space, nn.functional.layer_norm(wide.space, (3,)))


def test_aggregation_is_the_lorentz_centroid():
    data = random_graph(8)
    x = random_points((2, 3), 8, RADIUS)
    weights = dense_adjacency(data)
    got = aggregate(x, read_graph(data))
    close(got.sphere, RADIUS * unit(weights @ x.sphere))
    m = weights @ x.hyperboloid
    close(got.hyperboloid, RADIUS * m / (m[:, :1] ** 2 - (m[:, 1:] ** 2).sum(1, keepdim=True)).sqrt())


@pytest.mark.parametrize("signature", [(0, 5), (4, 0), (3, 4)], ids=["hyperbolic", "spherical", "both"])
def test_attention_by_the_full_matrix(signature):
    """q = 0 is attention on the hyperboloid, p = 0 on the sphere; heads are averaged."""
    own, heads = Signature(*signature), 2
    layer = SplitAttention(own, heads)
    x = random_points(signature, 9, RADIUS)
    got = layer(x, read_graph(random_graph(9)))
    if own.q:
        free = (x.sphere @ layer.qkv.sphere.weight.T + layer.qkv.sphere.bias).reshape(9, 3, heads, own.q + 1)
        q, k, v = (RADIUS * unit(free)).unbind(1)
        out = sum(elu_attention(q[:, h], k[:, h], v[:, h]) for h in range(heads)) / heads
        close(got.sphere, RADIUS * unit(out))
    else:
        assert layer.qkv.sphere is None
        assert torch.equal(got.sphere, torch.full((9, 1), RADIUS))
    if own.p:
        free = x.hyperboloid @ layer.qkv.space.weight.T + layer.qkv.space.bias
        q, k, v = free.reshape(9, 3, heads, own.p).unbind(1)
        out = sum(elu_attention(q[:, h], k[:, h], v[:, h]) for h in range(heads)) / heads
        close(got.space, out)
        close(got.height, (out.square().sum(1, keepdim=True) + RADIUS**2).sqrt())
    else:
        assert got.space.shape == (9, 0)
        close(got.height, torch.full((9, 1), RADIUS))


def test_temperature_is_a_factor_of_queries_and_keys():
    layer = SplitAttention(Signature(0, 4), 2, temperature=True)
    x = random_points((0, 4), 6)
    graph = read_graph(random_graph(6))
    before = layer(x, graph).space
    with torch.no_grad():
        layer.parts["space"].factor.copy_(torch.tensor([3.0, 0.5])[:, None, None])
    hot = layer(x, graph).space
    with torch.no_grad():
        layer.parts["space"].factor.fill_(1)
        for head, factor in enumerate((3.0, 0.5)):
            for part in range(2):  # rows of q and k; those of v stay
                rows = slice(4 * (2 * part + head), 4 * (2 * part + head + 1))
                layer.qkv.space.weight[rows] *= factor
    close(layer(x, graph).space, hot)
    assert (hot - before).abs().max() > 1e-3


def test_any_bidirectional_mechanism_packs_graphs_without_a_leak():
    """Every one of them: graphs side by side give what each gives alone."""
    graphs = [random_graph(n) for n in (5, 1, 7)]
    together = read_graph(side_by_side(graphs))
    points = [random_points((3, 4), len(graph.x)) for graph in graphs]
    joined = type(points[0])(torch.cat([x.sphere for x in points]), torch.cat([x.space for x in points]), 1.0)
    names = linattn.list_mechanisms(bidirectional=True)
    for name in names:
        layer = SplitAttention(Signature(3, 4), 2, name)
        alone = torch.cat([layer(x, read_graph(g)).joined() for x, g in zip(points, graphs, strict=True)])
        packed = layer(joined, together).joined()
        assert (packed - alone).abs().max() < 1e-9, name
    assert len(names) > 20


def test_heads_of_another_width():
    with pytest.raises(ValueError, match=r"even.*head_signature"):
        SplitAttention(Signature(4, 4), 1, "mirror")
    layer = SplitAttention(Signature(4, 4), 1, "mirror", head_signature=Signature(5, 6), combine="concat")
    check_on_manifold(layer(random_points((4, 4), 6), read_graph(random_graph(6))), 1.0)
    for head, message in ((Signature(5, 6), "concat"), (Signature(0, 6), "time")):
        with pytest.raises(ValueError, match=message):
            SplitAttention(Signature(4, 4), head_signature=head, combine="concat" if message == "time" else "mean")


def test_the_curvature_can_be_learned():
    curvature = Curvature(RADIUS, learn=True)
    close(curvature(), torch.tensor(RADIUS))
    assert [name for name, _ in curvature.named_parameters()] == ["raw"]
    assert Curvature(RADIUS)() == RADIUS
    with torch.no_grad():
        curvature.raw.fill_(-40)
    assert curvature() > 0
    for radius in (0.02, 30.0):
        close(Curvature(radius, learn=True).float()(), torch.tensor(radius, dtype=torch.float32), 1e-5)
        torch.set_default_dtype(torch.float32)
        close(Curvature(radius, learn=True)(), torch.tensor(radius), 1e-5 * radius)
        torch.set_default_dtype(torch.float64)


def test_wrong_rates_and_names_are_refused():
    for make, message in (
        (lambda: SplitDropout(1.0), "dropout"),
        (lambda: SplitActivation("sine"), "activation"),
        (lambda: Curvature(-1.0), "radius"),
        (lambda: SplitAttention(Signature(2, 2), combine="sum"), "combine"),
        (lambda: InputMap(3, Signature(2, 2), "conv", 0, "exponential"), "input_map"),
        *((lambda wrong=wrong: check_signature("signature", wrong), "signature")
          for wrong in (3, (1, 2, 3), (-1, 2), (0, 0), (1.5, 2))),
        *((lambda wrong=wrong: SplitAttention(Signature(2, 2), centroid=True, **wrong), "needs combine='mean'")
          for wrong in ({"combine": "concat"}, {"value_path": True})),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("filled", [1.0, 0.1], ids=["dense", "nearly all zeros"])
@pytest.mark.parametrize("kind", ["neighbours", "convolution"])
def test_input_sums_neighbours(kind, filled):
    """``A x W + b``: a node without edges is b, one with a loop of its own keeps it; or ``(A + 1) (x W + b)``."""
    data = random_graph(9)
    data.x = data.x * (torch.rand_like(data.x) < filled)
    layer = InputMap(CHANNELS, Signature(2, 2), kind, 0, "exponential")
    nn.init.normal_(layer.linear.bias)
    adjacency = torch.zeros(9, 9)
    adjacency[data.edge_index[1], data.edge_index[0]] = 1
    assert adjacency[0, 0] == 1
    wanted = adjacency @ data.x @ layer.linear.weight.T + layer.linear.bias
    if kind == "convolution":
        wanted = adjacency.fill_diagonal_(1) @ layer.linear(data.x)
    graph = read_graph(data)
    close(layer(graph.features(), graph, 1.0).joined(), layer._point(wanted, 1.0).joined())


def test_input_by_neighbours_is_that_of_pytorch_geometric():
    nn_of_graphs = pytest.importorskip("torch_geometric.nn", reason="needs torch_geometric")
    data, layer = random_graph(9), InputMap(CHANNELS, Signature(2, 2), "neighbours", 0, "exponential")
    theirs = nn_of_graphs.GCNConv(CHANNELS, 4, normalize=False)
    with torch.no_grad():
        theirs.bias.normal_()
        layer.linear.bias.copy_(theirs.bias)
        layer.linear.weight.copy_(theirs.lin.weight)
    graph = read_graph(data)
    close(layer._tangent(data.x, graph), theirs(data.x, data.edge_index))
    data.edge_weight = torch.rand(data.edge_index.shape[1])
    close(layer._tangent(data.x, read_graph(data)), theirs(data.x, data.edge_index, data.edge_weight))


def test_a_second_map_of_the_features_is_merged_by_the_midpoint():
    """``r (x + y) / sqrt(-<x + y, x + y>)`` of both points on the hyperboloid."""
    data = random_graph(7)
    layer = InputMap(CHANNELS, Signature(0, 4), "linear", 0, "midpoint", encoded=True)
    tangents = [data.x @ each.linear.weight.T + each.linear.bias for each in (layer, layer.encoding)]
    assert (tangents[0] - tangents[1]).abs().max() > 0.1
    length = [v.norm(dim=1, keepdim=True) / RADIUS for v in tangents]
    points = [torch.cat([RADIUS * n.cosh(), n.sinh() / n * v], 1) for n, v in zip(length, tangents, strict=True)]
    m = sum(points)
    wanted = RADIUS * m / (m[:, :1] ** 2 - (m[:, 1:] ** 2).sum(1, keepdim=True)).sqrt()
    close(layer(data.x, read_graph(data), RADIUS).hyperboloid, wanted)


def test_the_second_map_is_made_as_the_first_is():
    data = random_graph(7)
    graph, options = read_graph(data), (CHANNELS, Signature(2, 3), "neighbours", 0, "midpoint", True, 2)
    both, first, second = InputMap(*options, encoded=True), InputMap(*options), InputMap(*options)
    first.load_state_dict(both.state_dict(), strict=False)
    second.load_state_dict(both.encoding.state_dict())
    wanted = midpoint(*(layer(data.x, graph, RADIUS) for layer in (first, second)))
    close(both(data.x, graph, RADIUS).joined(), wanted.joined())


@pytest.mark.parametrize("signature", [(0, 5), (3, 4), (0, 1)], ids=["hyperbolic", "both", "one of space"])
def test_the_centroid_of_attention_by_the_full_matrix(signature):
    own, heads = Signature(*signature), 2
    layer = SplitAttention(own, heads, centroid=True)
    x = random_points(signature, 9, RADIUS)
    got = layer(x, read_graph(random_graph(9)))
    free = x.hyperboloid @ layer.qkv.space.weight.T + layer.qkv.space.bias
    q, k, v = free.reshape(9, 3, heads, own.p).unbind(1)
    points = torch.cat([(v.square().sum(-1, keepdim=True) + RADIUS**2).sqrt(), v], -1)
    m = sum(elu_attention(q[:, h], k[:, h], points[:, h]) for h in range(heads))
    close(got.hyperboloid, RADIUS * m / (m[:, :1] ** 2 - (m[:, 1:] ** 2).sum(1, keepdim=True)).sqrt())
    plain = SplitAttention(own, heads)
    plain.load_state_dict(layer.state_dict())
    assert (plain(x, read_graph(random_graph(9))).space - got.space).abs().max() > 1e-4
    close(plain(x, read_graph(random_graph(9))).sphere, got.sphere)


def test_dropout_of_weights_is_one_draw_for_all_nodes():
    x, layer = random_points((2, 3), 7), SplitLinear(Signature(2, 3), Signature(2, 3), weight_rates=(0.5, 0.4))
    torch.manual_seed(3)
    got = layer(x)
    torch.manual_seed(3)
    first, second = nn.functional.dropout(layer.sphere.weight, 0.5), nn.functional.dropout(layer.space.weight, 0.4)
    close(got.sphere, unit(x.sphere @ first.T + layer.sphere.bias))
    close(got.space, x.hyperboloid @ second.T + layer.space.bias)
    plain = SplitLinear(Signature(2, 3), Signature(2, 3))
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x).space, plain(x).space)


def test_a_norm_of_convolutions_comes_before_the_activation():
    x, data = random_points((3, 4), 8), random_graph(8)
    block = ConvolutionBlock(Signature(3, 4), Signature(3, 4), "tanh", (0.0, 0.0), norm=True)
    summed = aggregate(block.linear(x), read_graph(data))
    close(block(x, read_graph(data)).space, nn.functional.layer_norm(summed.space, (4,)).tanh())
