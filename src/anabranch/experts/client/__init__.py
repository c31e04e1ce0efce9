"""The caller's side of experts: one expert, many at once, and mixtures that continue without those that fail.

Open ``calls.py`` first: it is the boundary operation; ``remote_expert.py`` and ``mixture`` are modules above it.
"""

__all__: list[str] = []
