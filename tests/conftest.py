"""Fixtures that all tests share, and the check that a test releases all its resources."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import zlib
from collections.abc import Generator, Iterator

import pytest

from leaks import held_resources, wait_until_released
from programs import Programs


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """No test has a doctest: to look for some in all of these files takes each process seconds."""
    return [found for found in (yield) if type(found) is pytest.Module]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default=None, help="the default device of every test, such as cuda")


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--device")
    if device is None:
        yield
        return
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


def pytest_configure(config: pytest.Config) -> None:
    """Signals as in a terminal: a shell that starts the tests in the background lets them ignore some.

    Files left by killed processes are in a temporary directory of the tests, and are removed with it.
    """
    if not hasattr(config, "workerinput"):
        # Caches, and the folders of failed tests, outlive the tests.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        temporary = tempfile.TemporaryDirectory(prefix="anabranch-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(temporary.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = temporary.name
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _settle_hypothesis()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests may take long, on a busy machine too: their limit only ends those that hang."""
    for cases in _cases_of_functions(items):
        _leave_quick(cases)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


def _cases_of_functions(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the cases of each test that says how many of them are quick."""
    found: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("slow"):
            found.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    return list(found.values())


def _leave_quick(cases: list[pytest.Item]) -> None:
    """Mark all but the wanted number as slow, chosen by a hash of their names, which follows no parameter."""
    marker = cases[0].get_closest_marker("quick_cases")
    assert marker is not None
    (wanted,) = marker.args
    for case in sorted(cases, key=lambda case: zlib.crc32(case.name.encode()))[wanted:]:
        case.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on garbage collection examines objects made by tests, and not all imported ones.

    PyTorch logs its own tracing as soon as a handler listens, and pytest listens to all loggers that do not propagate:
    a fifth of the time of a capture. A device is in use from here on, so that no test seems to have left it open.
    """
    if session.config.getoption("--device") or any(item.get_closest_marker("cuda") for item in session.items):
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()


def _settle_hypothesis() -> None:
    """Draw the same examples each time, and set no deadline for one: a busy machine may take longer than the default.

    Imported only in processes that run tests: the one that distributes them starts seconds sooner without it and torch.
    """
    import hypothesis

    hypothesis.settings.register_profile("any machine", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = held_resources()
    yield
    left = wait_until_released(before)
    assert not left, f"outlived the test: {'; '.join(left)}"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Starts Python programs in their own processes, in milliseconds; see ``programs.py``."""
    return Programs(tmp_path_factory.mktemp("programs"))
