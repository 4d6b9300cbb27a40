"""Graph models: attention over nodes by any mechanism, in flat and in curved space."""

from linattn.models.graph.catalog import (
    GraphModelInfo,
    create_graph_model,
    graph_model_info,
    graph_model_options,
    graph_models,
)
from linattn.models.graph.convolution import GraphConvolutionalNetwork, SimpleGraphConvolution
from linattn.models.graph.flat import FlatGraphTransformer
from linattn.models.graph.gps import GraphAttention, create_gps_layer
from linattn.models.graph.graph import Graph, read_graph
from linattn.models.graph.manifold import PseudoHyperboloid, Split
from linattn.models.graph.model import FermiDirac, GraphModel
from linattn.models.graph.pseudo_riemannian import PseudoRiemannianGraphTransformer
from linattn.models.graph.split_attention import SplitAttention

__all__ = [
    "FermiDirac",
    "FlatGraphTransformer",
    "Graph",
    "GraphAttention",
    "GraphConvolutionalNetwork",
    "GraphModel",
    "GraphModelInfo",
    "PseudoHyperboloid",
    "PseudoRiemannianGraphTransformer",
    "SimpleGraphConvolution",
    "Split",
    "SplitAttention",
    "create_gps_layer",
    "create_graph_model",
    "graph_model_info",
    "graph_model_options",
    "graph_models",
    "read_graph",
]
