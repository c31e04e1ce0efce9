"""Checks beyond Dynamo's own guards: Python state that it reads without a guard, or differently from Python.

Open ``unseen.py`` first.
"""

__all__: list[str] = []
