"""Inference sessions: sequences that a caller continues step by step, with a cache on the server.

Not training: steps have no gradients. Open ``open_sessions.py`` first.
"""

__all__: list[str] = []
