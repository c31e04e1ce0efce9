"""LocalJob: a script as a job, its ends and words as plain data, and never longer than it was given."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import anabranch as ab
from waiting import running


def test_results_and_logs_come_back_by_rank() -> None:
    result = ab.testing.LocalJob(workers=2).run_source(
        """
        import json, os, sys
        print("to stdout", file=sys.stdout)
        print("to stderr", file=sys.stderr)
        print(json.dumps({"rank": int(os.environ["RANK"]), "argv": sys.argv[1:], "third": 1 / 3}))
        """,
        "--steps",
        "3",
    )
    assert result.check() is result
    assert result.exit_codes == (0, 0)
    assert result.results == tuple({"rank": r, "argv": ["--steps", "3"], "third": 1 / 3} for r in range(2))
    assert result.first_failure is None
    for log in result.logs:
        assert log.startswith("to stdout\nto stderr\n")


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    result = ab.testing.LocalJob(workers=2).run_source(
        """
        import os
        if os.environ["RANK"] == "1":
            raise RuntimeError("the cat is on the keyboard")
        """
    )
    assert result.exit_codes == (0, 1)
    assert result.first_failure == 1
    with pytest.raises(ab.RemoteError, match=r"(?s)rank 1 ended with 1.*the cat is on the keyboard"):
        result.check()


def test_a_rank_killed_by_a_signal_has_its_number_as_exit_code() -> None:
    result = ab.testing.LocalJob(workers=1).run_source("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert result.exit_codes == (-signal.SIGKILL,)
    assert result.first_failure == 0


@pytest.mark.slow
def test_a_job_that_hangs_ends_at_its_deadline_and_shows_where_it_hung(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    ab.testing.LocalJob().run_source("").check()  # the time to start the fork server is not one of the job's
    job = ab.testing.LocalJob(workers=2, timeout=10.0)
    with pytest.raises(ab.DeadlineExceeded, match="rank 1") as caught:
        job.run_source(
            """
            import os, pathlib, sys, time
            def waits_for_godot():
                time.sleep(600)
            if os.environ["RANK"] == "1":
                pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
                waits_for_godot()
            """,
            str(pid_file),
        )
    assert caught.value.peer is not None
    assert caught.value.peer.endswith("rank 1")
    assert "waits_for_godot" in caught.value.__notes__[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_job_without_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no-such\.py"):
        ab.testing.LocalJob().run(tmp_path / "no-such.py")


def test_other_children_of_the_calling_process_live_on(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        ab.testing.LocalJob().run_source("").check()
        assert bystander.poll() is None
        bystander.kill()


def test_jobs_run_side_by_side_in_threads() -> None:
    source = "import json, os, subprocess; subprocess.Popen(['sleep', '600']); print(json.dumps({'pid': os.getpid()}))"
    results: list[ab.testing.JobResult] = []
    with running(*[lambda: results.append(ab.testing.LocalJob(workers=2).run_source(source))] * 2):
        pass
    assert [result.exit_codes for result in results] == [(0, 0), (0, 0)]
    assert len({result["pid"] for job in results for result in job.results if result}) == 4
