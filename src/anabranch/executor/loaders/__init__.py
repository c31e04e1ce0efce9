"""Batches from the user's loaders: shared by all workers, and resumed at the next batch from any position.

Open ``loading.py`` first; ``leaf_ids.py`` learns which ids a step looks up in its batch.
"""
