"""TorchDynamo as the front-end: Python code becomes torch calls, under guards on the state that it read.

Open ``front.py`` first; ``refusals.py`` explains why code cannot be a graph.
"""
