"""The one differentiable boundary, which lookups, expert calls, ``all_reduce``, ``send`` and ``recv`` cross.

Open ``crossing.py`` first.

Not a transport: a boundary's ``forward`` and ``backward`` may do anything.
"""

__all__: list[str] = []
