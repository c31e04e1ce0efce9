"""Kernels are compiled by one process at a time, and once."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import typer
from numba.core import event

from anabranch.cli import serve
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables.kernels import _compiling
from anabranch.transport import Server
from waiting import running

SOURCE = """
from anabranch.tables.kernels._compiling import compiled

@compiled
def twice(x):
    return x + x
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(SOURCE)
    return imported(path)


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    with running(lambda: found.append(module.twice(2.0))):
        assert asked.wait(60)
        assert not found
        os.close(held)
    assert found == [4.0]


def test_it_does_not_wait_for_ever(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiling, "_LONGEST_WAIT", 1e-9)
    held = lock_of(module)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert module.twice(2.0) == 4.0
    finally:
        os.close(held)


def test_kernels_compiled_by_another_process_are_loaded(module: ModuleType) -> None:
    assert module.twice(2.0) == 4.0
    again = fresh(module)
    assert again.twice(2.0) == 4.0
    assert sum(again.twice.stats.cache_hits.values()) == 1


def fresh(module: ModuleType) -> ModuleType:
    """The same module as another process imports it."""
    return imported(Path(module.__file__ or ""))


def index_of(module: ModuleType) -> Path:
    return Path(module.twice._cache._cache_file._index_path)


def test_code_compiled_from_other_sources_is_compiled_again(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba looks at the file of a kernel alone; what the kernel calls may have changed all the same."""
    assert module.twice(2.0) == 4.0
    monkeypatch.setattr(_compiling, "_sources", lambda: "others")
    again = fresh(module)
    assert again.twice(2.0) == 4.0
    assert sum(again.twice.stats.cache_hits.values()) == 0


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("damage", [b"", b"\x80\x04", b"canabranch\nNoMore\n."])
@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
def test_a_file_that_cannot_be_read_is_made_anew(module: ModuleType, pattern: str, damage: bytes) -> None:
    """An index of an earlier version named a class that was no more, and every job with a cache ended in that error."""
    assert module.twice(2.0) == 4.0
    for path in index_of(module).parent.glob(pattern):
        path.write_bytes(damage)
    again = fresh(module)
    assert again.twice(2.0) == 4.0
    third = fresh(module)
    assert third.twice(2.0) == 4.0
    assert sum(third.twice.stats.cache_hits.values()) == 1


def test_without_a_place_to_keep_it_a_kernel_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sys.modules["numba"].njit

    def nowhere(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available")
        return real(*args, **options)

    monkeypatch.setattr(_compiling.numba, "njit", nowhere)
    with pytest.warns(RuntimeWarning, match="each process compiles the kernels again: cannot cache function"):
        kernel = _compiling.compiled(lambda x: x + x)
    assert kernel(2.0) == 4.0


def test_processes_that_load_compiled_code_do_not_wait_for_each_other(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a server said that it compiled kernels while it waited for others that loaded them."""
    assert module.twice(2.0) == 4.0
    again = fresh(module)

    def waited(_: float) -> None:
        raise AssertionError("it waited for a process that only loads")

    monkeypatch.setattr(_compiling, "time", SimpleNamespace(sleep=waited))
    held = lock_of(module)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        assert again.twice(2.0) == 4.0
        with pytest.raises(AssertionError, match="only loads"):
            again.twice(2)  # compiled: nobody else may read or write meanwhile
    finally:
        os.close(held)
    assert again.twice(3) == 6


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.name == "anabranch.compiling" and record.levelname == "INFO" for record in caplog.records)


@pytest.mark.parametrize("way", ["compiles", "waits"])
def test_a_process_that_compiles_or_waits_for_one_that_does_logs_one_line(
    module: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server printed nothing for 40 seconds on a new machine."""
    caplog.set_level("INFO", "anabranch.compiling")
    _compiling._say_once.cache_clear()
    held, waited = lock_of(module), list[int]()

    def let_go(_: float) -> None:
        waited.append(said(caplog))
        os.close(held)

    monkeypatch.setattr(_compiling, "time", SimpleNamespace(sleep=let_go))
    if way == "waits":
        fcntl.flock(held, fcntl.LOCK_EX)
    else:
        os.close(held)
    module.twice(2.0)
    module.twice(2)
    assert waited == ([1] if way == "waits" else [])  # said while it waited
    assert said(caplog) == 1
    _compiling._say_once.cache_clear()
    fresh(module).twice(2.0)  # loads
    assert said(caplog) == 1


def test_the_command_line_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    logger, library = logging.getLogger("anabranch.compiling"), logging.getLogger("anabranch")
    before = logger.level, list(library.handlers)
    try:
        serve._speak()
        _compiling._say_once.cache_clear()
        _compiling._say_once()
    finally:
        logger.setLevel(before[0])
        library.handlers[:] = before[1]
    shown = "anabranch: compiling the kernels of tables (once on this machine, about a minute)\n"
    assert capsys.readouterr().err == shown


def test_no_request_compiles_anything():
    with ParameterServer() as server, ParameterClient([server.endpoint]) as client:
        with event.install_recorder("numba:compile") as recorder:
            for k, make in enumerate([torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam]):
                client.init(
                    f"t{k}", (20, 4), kind="rows", init=0.5, optimizer=lambda rows, make=make: make(rows, lr=0.1)
                )
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                client.init(str(dtype)[6:], (3,), dtype=dtype, optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
                client.push(str(dtype)[6:], torch.ones(3, dtype=dtype))
            ids = torch.tensor([3, 7, 3])
            names = [f"t{k}" for k in range(3)]
            for _ in range(2):
                client.push_many({name: (ids, torch.ones(3, 4)) for name in names})
                client.pull_many(dict.fromkeys(names, ids))
        assert not recorder.buffer


def test_the_kernels_are_there_before_the_shard_listens(monkeypatch):
    order = []
    monkeypatch.setattr(
        "anabranch.parameter_server.server.shard_server.compile_kernels", lambda: order.append("compiled")
    )
    real = Server.__init__

    def noted(self, *arguments, **options):
        order.append("listens")
        real(self, *arguments, **options)

    monkeypatch.setattr(Server, "__init__", noted)
    with ParameterServer():
        pass
    assert order == ["compiled", "listens"]


def test_tcp_without_keys_is_refused_before_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, a minute later."""
    monkeypatch.setattr("anabranch.tables.warming.compile_kernels", pytest.fail)
    with pytest.raises(typer.BadParameter, match="TCP without certificates"):
        serve.parameters(listen="tcp://127.0.0.1:0")
