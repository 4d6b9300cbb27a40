"""A mechanism inside PyTorch Geometric's GPS layer, and its data as the models' input."""

import pytest
import torch

from linattn.models.graph import GraphAttention, create_gps_layer, create_graph_model
from models.graph.graphs import CHANNELS, close, random_graph

pytest.importorskip("torch_geometric", reason="needs torch_geometric")
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv


def loaded(sizes=(5, 2, 7)):
    """Graphs as Data, and as the one batch that the loader makes of them."""
    graphs = [Data(**vars(random_graph(n))) for n in sizes]
    (batch,) = DataLoader(graphs, batch_size=len(sizes))
    return graphs, batch


@pytest.mark.parametrize("mechanism", ["mirror", "lion"])
def test_gps_layer_attends_with_the_mechanism(mechanism):
    graphs, batch = loaded()
    layer = create_gps_layer(CHANNELS, GCNConv(CHANNELS, CHANNELS), 1, mechanism=mechanism, norm=None)
    got = layer(batch.x, batch.edge_index, batch.batch)
    alone = [layer(g.x, g.edge_index, torch.zeros(g.num_nodes, dtype=torch.int64)) for g in graphs]
    close(got, torch.cat(alone))
    # Its formula: h = conv + x + attention + x, then h + mlp(h); the attention is packed here, padded there.
    h = layer.conv(batch.x, batch.edge_index) + 2 * batch.x + layer.attn(batch.x, ptr=batch.ptr)
    close(got, h + layer.mlp(h))
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.attn.parameters())
    assert any(p.grad.abs().max() > 0 for p in layer.attn.parameters())


def test_gps_layer_starts_anew():
    layer = create_gps_layer(CHANNELS, GCNConv(CHANNELS, CHANNELS), 2)
    before = layer.attn.attention.qkv.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.attn.attention.qkv.weight)
    assert "(attention): Attention" in repr(layer.attn)
    with pytest.raises(TypeError, match="attn_type"):
        create_gps_layer(CHANNELS, None, attn_type="multihead")


def test_packed_and_padded_nodes_are_told_apart():
    attention = GraphAttention(CHANNELS)
    with pytest.raises(ValueError, match="mask"):
        attention(torch.randn(4, CHANNELS), torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="ptr"):
        attention(torch.randn(1, 4, CHANNELS), ptr=torch.tensor([0, 4]))


def test_models_take_batches_of_the_loader():
    graphs, batch = loaded()
    model = create_graph_model("pseudo_riemannian", in_channels=CHANNELS, hidden=6, out_channels=2).eval()
    close(model(batch), torch.cat([model(graph) for graph in graphs]))
