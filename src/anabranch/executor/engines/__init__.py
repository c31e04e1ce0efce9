"""The ways to run a training step: on the tape, as a graph, or ``auto``, which takes the graph where it is proved.

Open ``engine.py`` for what an engine is, ``tape_engine.py`` for the plain one, ``auto_engine.py`` for the default.
"""

__all__: list[str] = []
