"""Torch calls become graphs of ATen operations: the forward and backward of a step, and its optimizers' updates.

Open ``capture.py`` for any function, ``backward.py`` and ``update.py`` for a step's two halves. ``make_fx.py`` holds
what depends on PyTorch's tracer.
"""

__all__: list[str] = []
