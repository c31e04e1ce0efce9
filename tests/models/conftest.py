"""Models of other libraries: marked, and skipped where the libraries are absent."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tomllib
from pathlib import Path

import pytest

# No model and no data is ever fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if importlib.util.find_spec("tqdm") is not None:
    importlib.import_module("tqdm").tqdm.monitor_interval = 0  # no thread that outlives a test

GROUPS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["dependency-groups"]
PACKAGES = [name.replace("-", "_") for name in GROUPS["models"]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.models)
            if absent:
                item.add_marker(pytest.mark.skip(reason=f"`make test-models` installs {', '.join(absent)}"))
