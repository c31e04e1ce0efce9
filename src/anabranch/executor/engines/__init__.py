"""The ways to run a training step: on the tape, or as a graph.

Open ``engine.py`` for the interface, ``tape_engine.py`` for the default, ``checked_graph.py`` for ``engine="graph"``.
"""

__all__: list[str] = []
