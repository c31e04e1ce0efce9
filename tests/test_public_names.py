"""Every package lists what it exports: sorted, complete, and nothing that is not there."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest

import anabranch as ab

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ab.__path__, "anabranch.")
    if not any(part.startswith("_") for part in module.name.split("."))
)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["anabranch", *MODULES])
def test_all_is_sorted_and_every_name_is_there(name: str) -> None:
    module = load(name)
    assert module.__all__ == sorted(set(module.__all__))
    for exported in module.__all__:
        assert hasattr(module, exported)


@pytest.mark.parametrize("name", ["anabranch", *MODULES])
def test_no_public_definition_is_left_out_of_all(name: str) -> None:
    module = load(name)
    defined = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert defined <= set(module.__all__)


@pytest.mark.parametrize("name", ["anabranch", *MODULES])
def test_every_public_definition_has_a_docstring(name: str) -> None:
    module = load(name)
    assert module.__doc__
    for exported in module.__all__:
        value = getattr(module, exported)
        if getattr(value, "__module__", None) == module.__name__:
            assert value.__doc__, f"{name}.{exported} has no docstring"
