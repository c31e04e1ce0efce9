"""Runs a script as the workers of one job on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from anabranch.launch.environment import worker_environment
from anabranch.launch.orphans import adopt_orphans, kill_orphans
from anabranch.launch.outcome import Exit, Outcome
from anabranch.launch.screen import Screen
from anabranch.launch.signals import collect_signals
from anabranch.launch.store import host_store
from anabranch.launch.supervisor import Patience, Supervisor
from anabranch.launch.worker import Worker

__all__ = ["launch"]


def launch(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int = 1,
    log_dir: Path,
    live: bool = False,
    environment: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Runs ``script`` in ``workers`` processes that form a ``torch.distributed`` job, and waits for all of them.

    When it returns, no process that the job started is left.

    Args:
        script: the Python file.
        arguments: what it finds in ``sys.argv[1:]``.
        workers: how many processes; at least 1.
        log_dir: an existing directory; rank r's output goes to ``worker-<r>.log`` there.
        live: show rank 0's output on this process's stdout and stderr, too.
        environment: what the workers' environment is made from; ``os.environ`` by default.
        patience: how long workers may take to end after a failure or a signal.
        seconds: end the job after this time; ``None`` for as long as it takes.
        tell: called with each line that a user should see at once.

    Raises:
        ValueError: ``workers`` is below 1, or there is no such script.
    """
    if workers < 1:
        raise ValueError(f"a job has at least 1 worker, got workers={workers}")
    if not script.exists():
        raise ValueError(f"there is no script {str(script)!r} here; it is looked up from {os.getcwd()!r}")
    run_id = uuid.uuid4().hex
    base = os.environ if environment is None else environment
    command = [sys.executable, "-u", str(script), *arguments]
    started = time.monotonic()
    with ExitStack() as stack:
        scratch = stack.enter_context(_scratch())
        store = host_store()
        logs = [log_dir / f"worker-{rank}.log" for rank in range(workers)]
        screen = stack.enter_context(Screen(logs[0])) if live else None
        signals = stack.enter_context(collect_signals())
        running: list[Worker] = []
        stack.enter_context(adopt_orphans())
        stack.callback(lambda: kill_orphans(f"TORCHELASTIC_RUN_ID={run_id}", {worker.pid for worker in running}))

        def say(line: str) -> None:
            if screen:
                screen.finish_line()
            tell(line)

        supervisor = Supervisor(running, signals, screen=screen, patience=patience, seconds=seconds, tell=say)
        stack.callback(supervisor.kill)
        for rank, log in enumerate(logs):
            env = worker_environment(
                rank,
                workers,
                run_id=run_id,
                store_port=store.port,
                error_file=scratch / f"error-{rank}.json",
                base=base,
            )
            running.append(Worker(rank, command, env, log, screen if rank == 0 else None))
        if screen:
            screen.started()
        supervisor.run()
    return Outcome(
        exits=tuple(Exit(w.rank, w.pid, w.exit_code or 0, w.ended_at, w.stopped, w.log) for w in running),
        interrupted=supervisor.interrupted,
        timed_out=supervisor.timed_out,
        seconds=time.monotonic() - started,
    )


@contextmanager
def _scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="anabranch-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
