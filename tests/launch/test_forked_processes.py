"""A process that was forked for a job is to its script as one that was started for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HURRIED, Ends, Script, launch

from anabranch.launch.forks import launcher_side
from anabranch.launch.forks.launcher_side import ForkServer, ForkServerError, why_no_fork_server, why_not_forked
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.supervision.orphans import adopt_orphans
from anabranch.testing import LocalJob
from launched import start_launcher
from waiting import wait_until

# Whether a script was forked: only then has somebody imported torch before it.
FACTS = """
import faulthandler, json, os, random, sys
forked = "torch" in sys.modules
import multiprocessing, signal, tempfile, threading
import numpy, torch
main = sys.modules["__main__"]
print(json.dumps({
    "forked": forked,
    "torch": torch.rand(2).tolist(), "seed": torch.initial_seed(), "random": random.random(),
    "numpy": numpy.random.random(), "key": multiprocessing.current_process().authkey.hex(),
    "facts": {
        "argv": sys.argv, "flags": repr(sys.flags), "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__,
        "file": __file__, "cached": __cached__, "spec": repr(__spec__), "package": repr(__package__),
        "main": vars(main) is globals(), "builtins": repr(__builtins__), "annotations": __annotations__,
        "loader": type(__loader__).__mro__[-3].__name__,
        "threads": torch.get_num_threads(),
        "thread_count": len(os.listdir("/proc/self/task")), "thread": threading.current_thread().name,
        "cwd": os.getcwd(), "umask": os.umask(0), "environment": dict(os.environ),
        "group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0) == os.getpid(), "temporary": tempfile.gettempdir(),
        "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors, sys.stdout.write_through],
        "stdin": sys.stdin.read(), "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1],
        "signals": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        "Ctrl-C": repr(signal.getsignal(signal.SIGINT)), "stacks": faulthandler.is_enabled(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "cmdline": open("/proc/self/cmdline").read().rstrip("\\0"),
        "environ": sorted(filter(None, open("/proc/self/environ").read().split("\\0"))),
        "parent": os.getppid(), "process": multiprocessing.current_process().name,
        "children": multiprocessing.active_children(),
    },
}))
"""
# What no two processes, or no two jobs, have in common.
OWN = {
    *("ANABRANCH_JOB", "ANABRANCH_STATUS", "ANABRANCH_MEETING", "ANABRANCH_MEMBERS", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
}


def seen(script: Path, *arguments: str, spawn: bool, workers: int = 1) -> tuple[dict[str, object], ...]:
    environment = {"TMPDIR": str(script.parent), "TZ": "Asia/Tokyo"}
    result = LocalJob(workers=workers, spawn=spawn, environment=environment).run(script, *arguments).check()
    assert all(found is not None and found["forked"] is not spawn for found in result.results), result.logs
    return result.results  # type: ignore[return-value]


def comparable(found: dict[str, object]) -> dict[str, object]:
    facts = dict(found["facts"])  # type: ignore[call-overload]
    facts["environment"] = {name: value for name, value in facts["environment"].items() if name not in OWN}
    facts["environ"] = [entry for entry in facts["environ"] if entry.partition("=")[0] not in OWN]
    return facts


@pytest.mark.slow
def test_a_forked_script_sees_the_same_environment_as_a_started_one(script: Script) -> None:
    path = script(FACTS)
    (forked,), (started,) = (seen(path, "--x", "a b", spawn=spawn) for spawn in (False, True))
    assert comparable(forked) == comparable(started)


def test_each_fork_draws_its_own_random_numbers_where_a_process_does(script: Script) -> None:
    first, second = seen(script(FACTS), spawn=False, workers=2)
    for name in ("torch", "seed", "random", "numpy", "key"):
        assert first[name] != second[name]


# A script that ends in each of these ways; both kinds of process must end and say the same.
ENDS = {
    "an error": "def f():\n    {}['absent']\ntry:\n    f()\nexcept KeyError as e:\n    raise RuntimeError from e",
    "no such module": "import no_such_module",
    "wrong syntax": "x = (\ny = 1",
    "a hook": "import sys\nsys.excepthook = lambda kind, e, trace: print(kind, trace.tb_frame.f_code.co_name)\n1 / 0",
    "a code": "import sys; sys.exit(7)",
    "a message": "import sys; sys.exit('enough')",
    "Ctrl-C": "raise KeyboardInterrupt",
    "atexit": "import atexit; atexit.register(print, 'last')\nclass X:\n    def __del__(self): print('gone')\nx = X()",
    "finalizer": "import weakref\nclass X: pass\nx = X()\nweakref.finalize(x, print, 'gone')",
    "a thread": "import threading as t\ndef late():\n    t.main_thread().join()\n    print('late')\n"
    "t.Thread(target=late).start()\nprint('early')",
    "os._exit": "import os; print('half', end=''); os._exit(3)",
    "C's output": "import ctypes; ctypes.CDLL(None).printf(b'from C')",
}


def end_and_words(program: PythonProgram, log: Path, server: ForkServer | None) -> tuple[int, str]:
    """The exit code of a fork, or of a process that is started, and what it wrote."""
    with log.open("wb") as file, open(os.devnull, "rb") as nothing:
        if server is None:
            done = subprocess.run(program.command, stdin=nothing, stdout=file, stderr=file, check=False)
            return done.returncode, log.read_text()
        with adopt_orphans():
            pid = server.fork("worker-0", program, os.environ, nothing.fileno(), file.fileno(), file.fileno())
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), log.read_text()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("what", ENDS)
def test_every_end_is_that_of_a_process_that_was_started(
    what: str, script: Script, tmp_path: Path, fork_server: ForkServer
) -> None:
    program = PythonProgram(str(script(ENDS[what])), ("--x",))
    forked, started = (end_and_words(program, tmp_path / "log", server) for server in (fork_server, None))
    assert forked == started


def test_threads_are_as_many_as_the_environment_says(script: Script) -> None:
    path = script("import json, sys; print(json.dumps({'threads': sys.modules['torch'].get_num_threads()}))")
    (shown,) = LocalJob(environment={"OMP_NUM_THREADS": "2"}).run(path).check().results
    assert shown == {"threads": min(2, len(os.sched_getaffinity(0)))}


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTHONHASHSEED", "5"), ("LD_PRELOAD", ""), ("OMP_PROC_BIND", "false"), ("OMP_NUM_THREADS", "2,1")],
)
def test_variables_that_are_read_at_process_start_prevent_a_fork(script: Script, name: str, value: str) -> None:
    environment = {**os.environ, name: value}
    why = why_no_fork_server(environment) or why_not_forked(PythonProgram(str(script(""))), environment, os.environ)
    assert why is not None
    assert name in why


def test_a_directory_or_an_archive_is_run_by_a_plain_process(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "__main__.py").write_text("import json, sys; print(json.dumps({'forked': 'torch' in sys.modules}))")
    assert LocalJob().run(folder).check().results == ({"forked": False},)


def test_the_fork_server_has_one_thread_opens_nothing_and_ignores_the_signals_that_end_a_job(
    script: Script, tmp_path: Path, fork_server: ForkServer
) -> None:
    """A Ctrl-C goes to it too, and a restarted worker is forked from it."""
    program = PythonProgram(str(script("print('here')")))
    assert end_and_words(program, tmp_path / "log", fork_server) == (0, "here\n")
    here = Path("/proc", str(fork_server.pid))
    assert len(list((here / "task").iterdir())) == 1
    sockets = [path.name for path in (here / "fd").iterdir() if os.readlink(path).startswith("socket:")]
    assert sockets == ["0"]
    assert (here / "comm").read_text() == "fork-server\n"
    assert (here / "cmdline").read_text().rstrip("\0") == "anabranch: fork server"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(fork_server.pid, number)
    assert end_and_words(program, tmp_path / "log", fork_server) == (0, "here\n")


def test_a_fork_server_with_a_second_thread_forks_nothing(tmp_path: Path) -> None:
    """Its first import is one that starts a thread, which is a mistake of ours that would deadlock a fork some day."""
    (tmp_path / "numpy.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    )
    code = "import anabranch.launch.forks.fork_server as f; f._IMPORTED = ('numpy',); f.main()"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher_side, "_CODE", code)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        with ForkServer({**os.environ, "PYTHONPATH": path}) as server, adopt_orphans():
            with pytest.raises(ForkServerError, match="has 2 threads"):
                server.fork("worker-0", PythonProgram("x.py"), os.environ, 0, 1, 2)
            os.kill(server.pid, signal.SIGKILL)


def test_a_job_without_a_working_fork_server_says_so_and_runs_in_plain_processes(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ForkServer(os.environ) as server:
        os.kill(server.pid, signal.SIGKILL)
        told: list[str] = []
        path = script("import sys; print('torch' in sys.modules)")
        assert launch(path, workers=2, log_dir=tmp_path, server=server, tell=told.append).exit_code == 0
    assert (tmp_path / "worker-1.log").read_text() == "False\n"
    # Its end may be seen only at the second.
    assert 1 <= len(told) <= 2
    assert all(line.startswith("starting a plain process, which takes longer: ") for line in told)


def test_a_job_forks_again_after_a_fork_that_died(
    script: Script, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before it had said its number: from then on all newcomers were plain processes."""
    fork = fork_server.fork

    def fork_of_job(name: str, *arguments: object) -> int:
        if name == "worker-0":
            raise ForkServerError("its fork died")
        return fork(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fork_server, "fork", fork_of_job)
    told: list[str] = []
    path = script("import sys; print('torch' in sys.modules)")
    assert launch(path, workers=2, log_dir=tmp_path, server=fork_server, tell=told.append).exit_code == 0
    assert [(tmp_path / f"worker-{rank}.log").read_text().split()[-1] for rank in range(2)] == ["False", "True"]
    assert told == ["starting a plain process, which takes longer: its fork died"]


@pytest.mark.slow
def test_a_fork_server_ends_with_its_process_also_while_it_starts() -> None:
    code = (
        "import os; from anabranch.launch.forks.launcher_side import ForkServer; "
        "print(ForkServer(os.environ).pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_fork_server_that_still_imports_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_side, "_CODE", "import time; time.sleep(600)")
    server = ForkServer(os.environ)
    server.close()
    assert server._process.returncode == -signal.SIGKILL


def test_a_fork_dies_with_its_launcher_and_not_with_the_fork_server(tmp_path: Path) -> None:
    code = """
import os, sys, time
from anabranch.launch.forks.launcher_side import ForkServer
from anabranch.launch.supervision.orphans import adopt_orphans
from anabranch.launch.python_program import PythonProgram
with adopt_orphans(), ForkServer(os.environ) as server:
    pid = server.fork("worker-0", PythonProgram(sys.argv[1]), os.environ, 0, 1, 2)
    print(pid, flush=True)
os.kill(pid, 0)  # the server has ended
print("lives", flush=True)
time.sleep(600)
"""
    script, path = tmp_path / "sleeps.py", tmp_path / "launcher.py"
    script.write_text("import time; time.sleep(600)")
    path.write_text(code)
    with start_launcher(path, script) as launcher:
        pid = int(launcher.stdout.readline())
        assert launcher.stdout.readline() == "lives\n"
        launcher.kill()
        wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_the_launcher_and_the_command_line_import_neither_torch_nor_ray() -> None:
    ours = "anabranch.cli.app, anabranch.launch.local, anabranch.launch.ray.ray_engine, anabranch.launch.ray.role_actor"
    code = f"import sys, {ours}; sys.exit(bool({{'ray', 'torch'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_gpu_makes_plain_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_fork_server({}) is None
    monkeypatch.setattr(launcher_side, "_DRIVERS", (tmp_path,))
    assert why_no_fork_server({}) is not None
    assert why_no_fork_server({"CUDA_VISIBLE_DEVICES": "0"}) is not None
    assert why_no_fork_server({"CUDA_VISIBLE_DEVICES": ""}) is None


def test_a_lost_rendezvous_ends_the_job_and_is_named(ended: Ends) -> None:
    source = """
        import os, pathlib, signal, time
        for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
            try:
                found = path.read_text() == "rendezvous-0\\n"
                mine = os.environ["TORCHELASTIC_RUN_ID"] in path.with_name("environ").read_text()
            except OSError:
                continue
            if found and mine:
                os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(600)
        """
    failure = ended(source, code=1, workers=1, patience=HURRIED).outcome.first_failure
    assert failure is not None
    assert failure.describe().startswith("rendezvous 0 (pid ")
