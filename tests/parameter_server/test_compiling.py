"""Kernels are compiled by one process at a time, and once."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("numba")

from anabranch.parameter_server import _compiling

SOURCE = """
from anabranch.parameter_server._compiling import compiled

@compiled
def twice(x):
    return x + x
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def lock_of(module: ModuleType) -> int:
    """The open lock file of the kernel, as another process holds it."""
    path = Path(module.twice.stats.cache_path, "kernels_of_a_test.twice.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT)


def test_a_process_waits_for_another_that_compiles_the_same(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = threading.Event(), []
    monkeypatch.setattr(_compiling, "time", SimpleNamespace(sleep=lambda _: asked.set()))
    held = lock_of(module)
    fcntl.flock(held, fcntl.LOCK_EX)
    waiting = threading.Thread(target=lambda: found.append(module.twice(2.0)))
    waiting.start()
    assert asked.wait(60)
    assert not found
    os.close(held)
    waiting.join(60)
    assert found == [4.0]


def test_it_does_not_wait_for_ever(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiling, "_LONGEST_WAIT", 1e-9)
    held = lock_of(module)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert module.twice(2.0) == 4.0
    finally:
        os.close(held)


def test_what_another_process_has_compiled_is_loaded(module: ModuleType) -> None:
    assert module.twice(2.0) == 4.0
    path = Path(module.__file__ or "")
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.twice(2.0) == 4.0
    assert sum(again.twice.stats.cache_hits.values()) == 1


def test_without_a_place_to_keep_it_a_kernel_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sys.modules["numba"].njit

    def nowhere(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available")
        return real(*args, **options)

    monkeypatch.setattr(_compiling.numba, "njit", nowhere)
    with pytest.warns(RuntimeWarning, match="in each process anew: cannot cache function"):
        kernel = _compiling.compiled(lambda x: x + x)
    assert kernel(2.0) == 4.0
