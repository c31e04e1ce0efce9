"""Keys of one authority, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.transport import make_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder
