"""Pages that show a run or a graph in a browser: one file each, which loads nothing.

``page`` puts data, script and style together; ``trace_page`` makes the data of a trace, ``serving`` shows a page on
loopback. What it is not: a server that follows a run (``anabranch status --watch`` does). Open ``page.py``
first; the data of a graph is made in ``anabranch.graph.view``.
"""
