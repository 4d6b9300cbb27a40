"""Graphs: readers of common files, generators, splits without leaks, and a search for the space that suits a graph."""

from linattn.lab.tasks.graph.curvature import sectional_curvature
from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.generated import communities, cycle, grid, random_graph, tree
from linattn.lab.tasks.graph.links import LabelledPairs, LinkSplit, split_links
from linattn.lab.tasks.graph.load import load_graph
from linattn.lab.tasks.graph.search import Signature, nearest_signature, search_signature
from linattn.lab.tasks.graph.splits import per_class_split, stratified_split

__all__ = [
    "GraphData",
    "LabelledPairs",
    "LinkSplit",
    "Signature",
    "communities",
    "cycle",
    "grid",
    "load_graph",
    "nearest_signature",
    "per_class_split",
    "random_graph",
    "search_signature",
    "sectional_curvature",
    "split_links",
    "stratified_split",
    "tree",
]
