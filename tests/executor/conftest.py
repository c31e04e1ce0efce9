"""Loaders that are closed at a test's end; and what was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from loader_kinds import bound

from anabranch.executor.loaders.loading import BoundLoader


@pytest.fixture
def opened() -> Iterator[Callable[..., BoundLoader]]:
    loaders: list[BoundLoader] = []

    def make(loader: Iterable[object], **options: object) -> BoundLoader:
        loaders.append(bound(loader, **options))  # type: ignore[arg-type]
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
    loaders.clear()  # a DataLoader's persistent workers live as long as it does
