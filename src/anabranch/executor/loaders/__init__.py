"""Batches from the user's loaders: shared by all workers, and resumed at the next batch from any position.

Open ``loading.py`` first; ``positions.py`` says where each kind of loader stands.
"""

__all__: list[str] = []
