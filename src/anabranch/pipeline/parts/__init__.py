"""Models other than ``nn.Sequential``, cut into parts that run one after the other.

It is not a compiler: every module between two cuts runs unchanged. Open ``split.py`` for the users' function, then
``tracing.py``, which records the code between those modules, and ``part_program.py``, which runs it.
"""
