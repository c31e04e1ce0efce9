"""Requests of many callers as batches of one expert: queues, their order, and the thread that computes them.

The expert itself is in ``backend.py``. Open ``task_pool.py`` first.
"""

__all__: list[str] = []
