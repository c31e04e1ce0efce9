"""Rewriting graphs: each file has a function from a graph to an equivalent graph; open ``duplicates.py`` first."""
