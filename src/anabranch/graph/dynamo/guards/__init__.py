"""Checks beside Dynamo's own guards: Python state that it reads without a guard, or reads otherwise than Python does.

Open ``unseen.py`` first.
"""

__all__: list[str] = []
