"""Every package that users import lists what it exports: sorted, complete, and only existing names."""

from __future__ import annotations

import importlib
import pkgutil

import anabranch as ab

NAMES = sorted(module.name for module in pkgutil.walk_packages(ab.__path__, "anabranch.") if module.ispkg)
PACKAGES = [importlib.import_module(name) for name in ("anabranch", *NAMES)]
MODULES = [package for package in PACKAGES if hasattr(package, "__all__")]


def test_all_is_sorted_and_every_name_is_there() -> None:
    for module in MODULES:
        assert module.__all__ == sorted(set(module.__all__)), module.__name__
        for exported in module.__all__:
            assert hasattr(module, exported), f"{module.__name__} has no {exported}"


def test_every_public_definition_has_a_docstring() -> None:
    for module in MODULES:
        assert module.__doc__, f"{module.__name__} has no docstring"
        for exported in module.__all__:
            value = getattr(module, exported)
            if getattr(value, "__module__", None) == module.__name__:
                assert value.__doc__, f"{module.__name__}.{exported} has no docstring"
