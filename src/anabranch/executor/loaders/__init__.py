"""Batches from the user's loaders: shared by all workers, and resumed at the next batch from any position.

Open ``loading.py`` first; ``positions.py`` has the position of each kind of loader.
"""

__all__: list[str] = []
