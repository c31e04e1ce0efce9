"""The program of a process of a job: a Python file or a module, with its arguments."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A Python program.

    >>> PythonProgram("train.py", ("--lr", "0.1")).command[1:]
    ['-u', 'train.py', '--lr', '0.1']
    >>> PythonProgram("package.module", is_module=True).command[1:]
    ['-u', '-P', '-m', 'package.module']
    >>> PythonProgram("package.module", is_module=True, looks_here=True).command[1:]
    ['-u', '-m', 'package.module']

    Attributes:
        target: the path of a file, or the name of a module.
        arguments: its ``sys.argv[1:]``.
        is_module: whether ``target`` names a module.
        looks_here: whether a module is looked for in the current directory first, as ``python -m`` does.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    looks_here: bool = False

    def check(self) -> None:
        """Check that the file, or the package of the module, exists, without importing anything.

        Raises:
            ValueError: it does not.
        """
        if not self.is_module:
            if not Path(self.target).exists():
                hint = "" if self.target.endswith(".py") or os.sep in self.target else "; for a module give -m"
                raise ValueError(
                    f"the script {self.target!r} does not exist; it is looked up from {os.getcwd()!r}{hint}"
                )
            return
        name = self.target.partition(".")[0]
        here = PathFinder.find_spec(name, [os.getcwd()]) if self.looks_here and name.isidentifier() else None
        if here is None and not (name.isidentifier() and find_spec(name)):
            raise ValueError(
                f"there is no module {name!r}; it is looked up from {os.getcwd()!r} and among the installed "
                "packages. Give a file's path without -m"
            )

    @property
    def command(self) -> list[str]:
        """The command line of a plain process that runs it."""
        how = [] if not self.is_module else ["-m"] if self.looks_here else ["-P", "-m"]
        return [sys.executable, "-u", *how, self.target, *self.arguments]
