"""The record of what this process does, for its launcher and for whoever looks at a job.

``spans.py`` first: what is done, timed. Open spans are the waits and the activity, closed ones the trace. It also has
the fault points, where a test may make the process fail.
``process.py`` writes both for the launcher, with the process's counts; ``trace.py`` makes one file of what processes
recorded.
"""

from __future__ import annotations

__all__: list[str] = []
