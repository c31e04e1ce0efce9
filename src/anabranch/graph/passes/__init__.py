"""Rewriting graphs: each file has a function from a graph to an equivalent graph; open ``dead_nodes.py`` first."""
