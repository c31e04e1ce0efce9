"""Checks the arguments of ``Executor`` other than its steps, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path

from anabranch.checkpoint.generations import check_path
from anabranch.tables import Cache


def check_arguments(
    *, seed: object, cache: object, dataloaders: object, state: object, check_workers: object, steps: Iterable[str]
) -> None:
    """Raise for an argument of the wrong kind.

    Raises:
        TypeError: names the argument, its value, and what is accepted.
        ValueError: a loader for a step that does not exist, or a negative number.
    """
    if not isinstance(seed, Integral | None):
        raise TypeError(f"seed is a whole number, or None, got {seed!r}")
    if not isinstance(cache, Cache | None):
        rows = f"; for {cache} rows write ab.Cache(capacity={cache})" if isinstance(cache, int) else ""
        raise TypeError(f"cache is an ab.Cache or None, got {cache!r}{rows}")
    if not isinstance(dataloaders, Mapping | None):
        raise TypeError(f"dataloaders is a dict of loaders by the step's name, got {dataloaders!r}")
    if isinstance(check_workers, bool) or not isinstance(check_workers, Integral) or check_workers < 0:
        kind = ValueError if isinstance(check_workers, Integral) and check_workers < 0 else TypeError
        raise kind(f"check_workers is a number of steps, or 0 for never, got {check_workers!r}")
    names = sorted(steps)
    for name in dataloaders or {}:
        if name not in names:
            raise ValueError(f"no step is called {name!r}; the steps are {names}")
    _check_state(state)


def check_log_path(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of the file that ``record_loads`` appends to.

    Raises:
        ValueError: no file can be made there.
    """
    if path is None:
        return None
    found = check_path(path, "log_path")
    if not found.parent.is_dir():
        raise ValueError(f"log_path={path!r} is in a directory that does not exist; create {found.parent}")
    return found


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping | None):
        raise TypeError(f"state is a dict of objects by name, got {type(state).__name__}")
    for name, value in (state or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"the names in state are strings, got {name!r}")
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(f"state {name!r} is a {type(value).__name__} without state_dict and load_state_dict")
