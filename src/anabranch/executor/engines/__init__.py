"""The ways to run a training step: on the tape, as a graph, or by a pipe's schedule.

Open ``engine.py`` for the interface, ``tape_engine.py`` for the default, ``graph_engine.py`` for ``engine="graph"``.
``gradients.py`` has what happens between backward and the optimizers, ``trial.py`` the comparison of a new graph.
"""

__all__: list[str] = []
