"""The command line, ``anabranch``: one file a command, each a thin layer over the package that does the work.

What it is not: a second way to do anything. Open ``run.py`` first.
"""

from anabranch.cli.app import main

__all__ = ["main"]
