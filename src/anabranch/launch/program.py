"""The program of a process of a job: a Python file or a module, with its arguments."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Program"]


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program.

    >>> Program("train.py", ("--lr", "0.1")).command[1:]
    ['-u', 'train.py', '--lr', '0.1']
    >>> Program("package.module", is_module=True).command[1:]
    ['-u', '-P', '-m', 'package.module']

    Attributes:
        target: the path of a file, or the name of a module.
        arguments: what it finds in ``sys.argv[1:]``.
        is_module: whether ``target`` names a module, which is then not looked for in the current directory.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> list[str]:
        """The command line of a plain process that runs it."""
        how = ["-P", "-m"] if self.is_module else []
        return [sys.executable, "-u", *how, self.target, *self.arguments]

    @property
    def is_source(self) -> bool:
        """Tell whether it is a module or a file of Python source: no directory, archive or compiled file."""
        path = Path(self.target)
        return self.is_module or (path.is_file() and path.suffix != ".pyc" and not zipfile.is_zipfile(path))
