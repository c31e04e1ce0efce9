"""The ways to run a training step: on the tape, as a graph, or by a pipe's schedule.

Open ``engine.py`` first: the interface, and the tape, which is the default. ``graph_engine.py`` has ``engine="graph"``
and the comparison of a new graph with the tape, ``gradients.py`` what is between backward and the optimizers.
"""
