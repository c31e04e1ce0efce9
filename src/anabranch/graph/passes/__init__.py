"""Rewriting graphs: each file has a function from a graph to an equivalent graph.

Open ``duplicates.py`` for the smallest, ``gradients.py`` for the derivative of a graph as a graph.
"""

__all__: list[str] = []
