"""What goes wrong before anything runs: one sentence each, with the cure. No Ray is started."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anabranch.launch import JobSpec
from anabranch.launch.job import Attempt
from anabranch.launch.job_status import JobFile
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray import RayError, run
from anabranch.launch.ray.ray_engine import _Site, connected, import_ray, parse_resources, resources_of
from anabranch.launch.ray.role_actor import RoleEvents
from anabranch.launch.supervision.signals import Stopped
from anabranch.launch.supervision.worker import ProcessSpec


class _Ray(ModuleType):
    """Stands in for Ray, which takes a second to import."""

    def __init__(self, version: str = "2.60.0", says: str = "") -> None:
        super().__init__("ray")
        self.__version__ = version
        self._says = says

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        raise RuntimeError(self._says)


class _Failing(_Ray):
    """Every call's result is an error with these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        names = ("RuntimeEnvSetupError", "GetTimeoutError", "RayTaskError", "RayActorError")
        self.exceptions = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})
        self._words = words

    def get(self, reference: Any, timeout: float) -> Any:
        raise self.exceptions.RayActorError(self._words)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []


class _Answering(_Failing):
    """Every call's result is there at once."""

    def get(self, reference: Any, timeout: float) -> Any:
        return reference


def _site(ray: ModuleType, folder: Path, said: list[str] | None = None, **options: Any) -> _Site:
    (folder / "train.py").touch()
    spec = JobSpec(program=PythonProgram(str(folder / "train.py")), log_dir=folder, **options)
    tell = [].append if said is None else said.append
    return _Site(ray, Attempt(spec, 0, {}, JobFile(folder), tell, raises=False))


def test_a_node_without_the_package_is_reported_in_one_sentence(tmp_path: Path) -> None:
    words = "The actor died in its creation task\n...\nModuleNotFoundError: No module named 'anabranch'"
    with pytest.raises(
        RayError, match=r"a node of the cluster does not have Anabranch: pip install 'anabranch\[ray\]'"
    ):
        _site(_Failing(words), tmp_path)._ask(None)


def test_a_signal_ends_a_wait_for_a_node_before_the_job_has_begun(tmp_path: Path) -> None:
    site = _site(_Failing("nobody asks"), tmp_path)
    site._attempt.stop(signal.SIGINT)
    with pytest.raises(Stopped):
        site._ask(None)


def test_a_ray_of_another_version_is_named_with_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", _Ray("2.9.3"))
    with pytest.raises(RayError, match=r"Ray 2\.9\.3 is installed here.*pip install 'ray==2\.60\.0'"):
        import_ray()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Python itself says of a module that is not there; None in sys.modules does not name it alike.
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'anabranch\[ray\]'"):
        import_ray()


def test_a_cluster_that_cannot_be_used_and_an_address_without_an_answer_are_named_with_the_cure() -> None:
    says = "Version mismatch: The cluster was started with:\n Ray: 2.9.3"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(RayError, match=r"at 127.*Version mismatch.*'ray==2\.60\.0', and the same Python"):
            connected(_Ray(says=says), address).__enter__()
    with pytest.raises(RayError, match=rf"nothing answers at {address} .*ray start --head"):
        connected(_Ray(), address).__enter__()


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "here", "here:now"])
def test_an_address_that_is_not_a_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(RayError, match="HOST:PORT"):
        connected(_Ray(), address).__enter__()


@pytest.mark.parametrize("text", ["{", "[]", '{"boss": {"CPU": 1}}', '{"worker": 1}', '{"worker": {"CPU": "all"}}'])
def test_resources_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as \{\"worker\": \{\"CPU\": 2, \"GPU\": 1\}\}"):
        parse_resources(text)


def test_a_worker_requests_a_fraction_of_a_cpu_and_a_gpu_if_available() -> None:
    assert resources_of("worker", {}, gpus=False) == {"CPU": 0.5}
    assert resources_of("worker", {}, gpus=True) == {"CPU": 0.5, "GPU": 1.0}
    assert resources_of("worker", {"worker": {"GPU": 0}}, gpus=True) == {"CPU": 0.5}


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        *[(one, "needs 2 <= N <= MAX, as others cannot join one that trains alone") for one in ((1, 3), (4, 3))],
        (0, "workers must be at least 1, got 0"),
    ],
)
def test_numbers_of_workers_that_cannot_be_are_refused(workers: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run("train.py", workers=workers)


@pytest.mark.parametrize("sees", [True, False])
def test_a_node_without_the_launcher_s_folder_is_reported_once(
    sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    site = _site(_Answering(""), tmp_path, said)
    start = lambda spec, restarted, probe, files: (7, sees and Path(probe).exists())  # noqa: E731
    follow = SimpleNamespace(remote=lambda files: RoleEvents([], 0))
    for rank in range(2):
        site._actors["worker", rank] = SimpleNamespace(start=SimpleNamespace(remote=start), follow=follow)
        spec = ProcessSpec("worker", rank, site._attempt.spec.program, {}, tmp_path / f"worker-{rank}.log")
        site.start(spec, 0).reap()
    assert [line.partition(",")[0] for line in said] == ([] if sees else ["worker 0"])
