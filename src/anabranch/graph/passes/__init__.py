"""Rewriting graphs: each file a function from a graph to a graph that computes the same.

Open ``duplicates.py`` for the smallest, ``gradients.py`` for the derivative of a graph as a graph.
"""

__all__: list[str] = []
