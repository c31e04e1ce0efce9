"""TorchDynamo as the front-end: Python code becomes torch calls, under guards on the state that it read.

Open ``front.py`` first. The rest say what guards do not see (``unseen.py``, ``watched_code.py``, ``caught_lookups.py``,
``added_guards.py``), and why code cannot be a graph (``refusals.py``).
"""

__all__: list[str] = []
