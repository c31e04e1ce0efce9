"""Requests of many callers as batches of one expert: queues, their order, and the thread that computes them.

Not the expert, which ``backend.py`` is. Open ``task_pool.py`` first.
"""

__all__: list[str] = []
