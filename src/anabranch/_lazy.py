"""Names of a package that are imported at first use, so that a program which needs none of them does not wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec


def lazy_names(package: str, modules: Sequence[str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``: its ``__all__`` is looked up in ``modules``, in this order.

    Modules of the package are names of it, too, as if it had imported them all.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> object:
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        if name in namespace["__all__"]:
            for module in modules:
                home = import_module(f"{package}.{module}")
                if hasattr(home, name):
                    namespace[name] = getattr(home, name)
                    return namespace[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*namespace, *namespace["__all__"]})

    return get, names
