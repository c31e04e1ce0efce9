"""The program of a process of a job: a Python file or a module, with its arguments."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

__all__ = ["PythonProgram"]


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
        """Check that it exists, without importing anything.

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
        name, *inner = self.target.split(".")
        found = _find(name, [os.getcwd()]) if self.looks_here else None
        found = found or (find_spec(name) if name.isidentifier() else None)
        for part in inner:
            if found is None or found.submodule_search_locations is None:
                break
            name = f"{name}.{part}"
            found = _find(name, found.submodule_search_locations)
        if found is None:
            raise ValueError(
                f"there is no module {name!r}; it is looked up from {os.getcwd()!r} and among the installed "
                "packages. Give a file's path without -m"
            )
        places = found.submodule_search_locations
        if name != self.target:
            raise ValueError(f"{name!r} is a module, not a package, so there is no {self.target!r}")
        if places is not None and _find(f"{name}.__main__", places) is None:
            raise ValueError(f"{name!r} is a package without a __main__.py; name one of its modules")

    @property
    def command(self) -> list[str]:
        """The command line of a plain process that runs it."""
        how = [] if not self.is_module else ["-m"] if self.looks_here else ["-P", "-m"]
        return [sys.executable, "-u", *how, self.target, *self.arguments]

    @property
    def is_source(self) -> bool:
        """Return True for a module or a Python source file, not for a directory, archive or compiled file."""
        path = Path(self.target)
        return self.is_module or (path.is_file() and path.suffix != ".pyc" and not zipfile.is_zipfile(path))


def _find(name: str, places: Iterable[str]) -> ModuleSpec | None:
    return PathFinder.find_spec(name, list(places)) if name.rpartition(".")[2].isidentifier() else None
