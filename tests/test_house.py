"""The plan of the source tree: imports without circles, and lists of exported names that are sorted and complete."""

from __future__ import annotations

import importlib
import pkgutil

import grimp
import networkx as nx

import anabranch as ab


def test_imports_form_no_circle_however_late_they_are_made() -> None:
    found = grimp.build_graph("anabranch", cache_dir=None)
    imports = nx.DiGraph((a, b) for a in found.modules for b in found.find_modules_directly_imported_by(a))
    assert imports.number_of_edges() > 1000
    assert [sorted(part) for part in nx.strongly_connected_components(imports) if len(part) > 1] == []


# Every package that users import lists what it exports: sorted, complete, and only existing names.

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
