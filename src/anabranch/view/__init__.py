"""Pages that show a run or a graph in a browser: one file each, which loads nothing.

``page`` puts data, script and style together; ``trace_page`` and ``job_page`` make the data of a run, ``serving`` shows
a page on loopback. What it is not: a server that follows a run (``anabranch status --watch`` does). Open ``page.py``
first; the data of a graph is made in ``anabranch.graph.view``.
"""

__all__: list[str] = []
