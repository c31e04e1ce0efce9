"""The ways to run a training step: on the tape, as a graph, or ``auto``, which uses a graph that has been shown to be
equal and faster.

Open ``engine.py`` for the interface, ``tape_engine.py`` for the plain engine, ``auto_engine.py`` for the default.
"""

__all__: list[str] = []
