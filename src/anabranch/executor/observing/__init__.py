"""The outside view of a run: callbacks, sinks, progress, the facts for ``anabranch status``, traces.

Nothing here changes what is computed. Open ``watching.py`` first.
"""
