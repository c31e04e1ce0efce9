"""Models that are no ``nn.Sequential``, cut into parts that run one after the other.

Not a compiler: every module that lies between two cuts runs as it is. Open ``split.py`` for the users' function, then
``tracing.py``, which records the code between those modules, and ``part_program.py``, which runs it.
"""

__all__: list[str] = []
