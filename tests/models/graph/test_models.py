"""What holds for every graph model by name, and what the pseudo-Riemannian one adds."""

import copy
from types import SimpleNamespace

import pytest
import torch

from linattn.models.graph import (
    create_graph_model,
    graph_model_info,
    graph_model_options,
    graph_models,
    read_graph,
)
from linattn.models.graph.split_layers import SplitNorm
from models.graph.graphs import CHANNELS, check_on_manifold, close, inner, random_graph, side_by_side

HIDDEN, CLASSES = 8, 3
every_model = pytest.mark.parametrize("name", graph_models())

# Settings of the pseudo-Riemannian model that take different ways through it.
SETTINGS = {
    "plain": {},
    "spherical": {"signature": (8, 0)},
    "hyperbolic": {"signature": (0, 8), "activation": "relu"},
    "one of space": {"signature": (7, 1)},
    "all learned": {"learn_curvature": True, "radius": 1.5, "temperature": True, "num_heads": 2, "combine": "concat"},
    "degrees": {"degree_encoding": 3, "input_map": "convolution", "num_layers": 2},
    "midpoints": {"residual": "midpoint", "merge": "midpoint", "degree_encoding": 3, "value_path": True},
    "attention alone": {"graph_layers": 0, "residual": None, "norm": False, "input_norm": False},
    "convolutions alone": {"num_layers": 0, "graph_layers": 3},
    "centroids": {"centroid": True, "num_heads": 2, "feature_encoding": True},
    "as the authors": {"input_map": "neighbours", "input_norm": False, "weight_dropout": True, "graph_norm": True,
                       "graph_dropout": 0.0, "num_layers": 2, "graph_layers": 3},
}  # fmt: skip


def build(name, task="nodes", **options):
    out_channels = CLASSES if task == "nodes" else None
    return create_graph_model(
        name, in_channels=CHANNELS, hidden=HIDDEN, out_channels=out_channels, task=task, **options
    )


def test_weights_are_dropped_where_the_authors_drop_them_and_norms_stand_between_convolutions():
    """Before and after the blocks and to q, k and v, at the rates of time and of space; not behind the residual."""
    sizes = {"num_layers": 2, "graph_layers": 3, "dropout": (0.3, 0.1)}
    model = build("pseudo_riemannian", weight_dropout=True, graph_norm=True, **sizes)
    dropped = {name for name, module in model.named_modules() if getattr(module, "weight_rates", None) == (0.3, 0.1)}
    assert dropped == {"stem.1", "blocks.0.attention.qkv", "blocks.1.attention.qkv", "last"}
    assert [isinstance(block.norm, SplitNorm) for block in model.convolutions] == [True, True, False]
    plain = build("pseudo_riemannian", **sizes)
    assert not any(any(getattr(module, "weight_rates", ())) for module in plain.modules())
    assert not any(isinstance(block.norm, SplitNorm) for block in plain.convolutions)
    other = build("pseudo_riemannian", num_layers=2, centroid=True, feature_encoding=True)
    assert [block.attention.centroid for block in (*other.blocks, *plain.blocks)] == [True, True, False, False]
    assert (other.input.encoding is None, plain.input.encoding is None) == (False, True)


def results(model, data):
    """Logits of nodes, or embeddings for links."""
    return model(data) if model.task == "nodes" else model.encode(data)


@every_model
@pytest.mark.parametrize("task", ["nodes", "links"])
def test_graphs_side_by_side_are_as_each_alone(name, task):
    model = build(name, task).eval()
    graphs = [random_graph(n) for n in (6, 1, 9)]
    alone = torch.cat([results(model, graph) for graph in graphs])
    together = side_by_side(graphs)
    close(results(model, together), alone)
    batch = torch.arange(3).repeat_interleave(together.ptr.diff())
    close(results(model, SimpleNamespace(x=together.x, edge_index=together.edge_index, batch=batch)), alone)


@every_model
def test_numbering_of_nodes_does_not_matter(name):
    model, data = build(name).eval(), random_graph(9)
    order = torch.randperm(9)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(9))
    moved = SimpleNamespace(x=data.x[order], edge_index=place[data.edge_index].flip(1))
    close(model(moved), model(data)[order])


@every_model
@pytest.mark.parametrize("task", ["nodes", "links"])
def test_every_parameter_gets_a_gradient(name, task):
    check_gradients(build(name, task), random_graph(9))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("task", ["nodes", "links"])
def test_settings_stay_on_the_manifold_and_learn(setting, task):
    model, data = build("pseudo_riemannian", task, dropout=(0.1, 0.2), **SETTINGS[setting]), random_graph(9)
    check_gradients(model, data)
    points = model.points(read_graph(data))
    check_on_manifold(points, model.curvature())
    assert (points.q, points.p) == model.out_signature
    other = copy.deepcopy(model).eval()
    graphs = [data, random_graph(5)]
    close(results(other, side_by_side(graphs)), torch.cat([results(other, graph) for graph in graphs]))


def check_gradients(model, data):
    if model.task == "links":
        data.edge_label_index = torch.randint(9, (2, 12))
    model.train()
    model(data).sigmoid().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@every_model
@pytest.mark.parametrize("task", ["nodes", "links"])
def test_fp32_is_close_to_fp64(name, task):
    """Some hundred operations deep and without cancellation: a few hundred times the precision of fp32."""
    model, data = build(name, task).eval(), random_graph(9)
    wanted = results(model, data)
    data.x = data.x.float()
    got = results(model.float(), data).double()
    assert (got - wanted).abs().max() <= 500 * torch.finfo(torch.float32).eps * wanted.abs().max()


def test_links_by_the_fermi_dirac_rule():
    model, data = build("pseudo_riemannian", "links", signature=(3, 5)).eval(), random_graph(9)
    z = model.encode(data)
    assert model.out_signature == (4, 5)
    close(inner(z, z, 4), torch.full((9,), -1.0))
    pairs = torch.randint(9, (2, 20))
    logits = model.decode(z, pairs)
    distance = model.manifold.distance(z[pairs[0]], z[pairs[1]])
    close(logits.sigmoid(), 1 / (((distance - 2) / 1).exp() + 1))
    close(model.decode(z, pairs.flip(0)), logits)
    data.edge_label_index = pairs
    close(model(data), logits)
    flat = build("gcn", "links").eval()
    z = flat.encode(data)
    close(flat.decode(z, pairs), 2 - (z[pairs[0]] - z[pairs[1]]).square().sum(1))


def test_embeddings_of_links_keep_the_proportion_of_time_and_space():
    cases = ((6, 2), 4, (3, 1)), ((7, 1), 2, (1, 1)), ((0, 8), 3, (0, 3)), ((8, 0), 3, (3, 0))
    for signature, width, wanted in cases:
        model = create_graph_model(
            "pseudo_riemannian", in_channels=CHANNELS, hidden=8, out_channels=width, task="links", signature=signature,
            graph_layers=0,
        )  # fmt: skip
        assert model.out_signature == wanted


def test_degrees_tell_nodes_apart_that_features_do_not():
    path = SimpleNamespace(x=torch.ones(3, CHANNELS), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    blind = build("pseudo_riemannian", graph_layers=0).eval()(path)
    close(blind[0], blind[1])
    seen = build("pseudo_riemannian", graph_layers=0, degree_encoding=4).eval()(path)
    close(seen[0], seen[2])
    assert (seen[0] - seen[1]).abs().max() > 1e-4


def test_small_features_do_not_stay_at_the_pole():
    """However small the features are, the nodes spread out as far; without the norm they do not leave the pole."""
    data = random_graph(9)
    data.x = 1e-2 * data.x
    for norm in (True, False):
        model = build("pseudo_riemannian", input_norm=norm)
        graph = read_graph(data)
        length = model.input(data.x, graph, 1.0).sphere[:, 1:].norm(dim=1)
        assert (length.mean() > 0.2) == norm


def test_hypformer_lives_on_the_hyperboloid():
    model = build("hypformer").eval()
    assert model.signature == model.out_signature == (0, HIDDEN)
    points = model.points(read_graph(random_graph(7)))
    assert torch.equal(points.sphere, torch.ones(7, 1))


def test_dropout_stops_in_evaluation():
    data = random_graph(9)
    for name in graph_models():
        model = build(name)
        assert torch.equal(model(data), model(data)) == (name == "sgc"), name
        model.eval()
        assert torch.equal(model(data), model(data)), name


def test_what_a_graph_derives_is_kept():
    """A graph read once serves many passes, and gives what the data gives."""
    data, model = random_graph(9), build("gcn").eval()
    graph = read_graph(data)
    close(model(graph), model(data))
    assert read_graph(graph) is graph
    assert graph.normalized is graph.normalized
    assert torch.equal(
        graph.degree, (data.edge_index[1][None] == torch.arange(9)[:, None]).sum(1) - torch.eye(9)[0].long()
    )


def test_wrong_data_is_named():
    data, model = random_graph(4), build("gcn")
    for broken, error, message in (
        ({"x": None}, TypeError, "data.x"),
        ({"x": data.x.long()}, TypeError, "data.x"),
        ({"edge_index": data.edge_index[0]}, TypeError, "data.edge_index"),
        ({"batch": torch.tensor([0, 1, 0, 1])}, ValueError, "sorted"),
        ({"batch": torch.tensor([0, 1])}, ValueError, "data.batch"),
    ):
        with pytest.raises(error, match=message):
            model(SimpleNamespace(**(vars(data) | broken)))
    with pytest.raises(ValueError, match="edge_label_index"):
        build("gcn", "links")(data)
    with pytest.raises(ValueError, match="task"):
        model.decode(data.x, data.edge_index)


def test_wrong_options_are_named():
    for arguments, error, message in (
        ({"name": "gat"}, ValueError, "name"),
        ({"name": "gcn", "task": "graphs"}, ValueError, "task"),
        ({"name": "gcn", "mechanism": "elu"}, ValueError, "mechanism"),
        ({"name": "gcn", "num_heads": 2}, TypeError, "num_heads"),
        ({"name": "sgformer", "block": "difformer"}, TypeError, "block"),
        ({"name": "hypformer", "signature": (4, 4)}, TypeError, "signature"),
        ({"name": "hypformer", "centroid": True}, TypeError, "no option 'centroid'"),
        ({"name": "pseudo_riemannian", "signature": (4, 3)}, ValueError, "hidden"),
        ({"name": "pseudo_riemannian", "num_layers": 0, "graph_layers": 0}, ValueError, "num_layers"),
        ({"name": "pseudo_riemannian", "residual": "sum"}, ValueError, "residual"),
        ({"name": "euclidean", "num_heads": 3}, ValueError, "num_heads"),
    ):
        with pytest.raises(error, match=message):
            build(**arguments)
    for arguments, message in (({"hidden": 0}, "hidden"), ({"out_channels": None}, "classes")):
        with pytest.raises(ValueError, match=message):
            create_graph_model("gcn", **({"in_channels": 4, "hidden": 4, "out_channels": 2} | arguments))


def test_the_catalog_tells_what_a_model_takes():
    assert graph_model_info("euclidean").takes_mechanism
    assert graph_model_options("difformer")["graph_layers"] == 0
    assert "mechanism" not in graph_model_options("pseudo_riemannian")
    model = build("euclidean", mechanism="mirror")
    assert type(model.blocks[0].attention.mechanism).__name__ == "Mirror"
