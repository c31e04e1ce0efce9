"""Commands with arguments that cannot be: refused before anything starts, by name and without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from anabranch.cli.app import _app

RUN, HERE, SCRIPT = "run", __file__, "{folder}/script.py"
SECONDS = [RUN, "--checkpoint-seconds"]
SERVER, DIRECTORY = [RUN, "--servers", "1"], [RUN, "--experts", "1", "--directory"]

WRONG = [
    ([RUN], "SCRIPT"),
    ([RUN, "absent.py"], "absent.py"),
    ([RUN, "pkg.absent"], "for a module give -m"),
    ([RUN, "-m", "absent.module"], "there is no module 'absent'"),
    ([RUN, "-m", "train.py"], "there is no module 'train'"),
    ([RUN, "-n", "2", HERE], "the number of workers is --workers 2"),
    (["plan", "--nproc-per-node=4", HERE], "the number of workers is --workers 4"),
    ([RUN, "--workers", "0", HERE], "1"),
    ([RUN, "--workers", "two", HERE], "--workers"),
    ([*SECONDS, "inf", HERE], "finite number of seconds above 0, got inf"),
    ([*SECONDS, "nan", HERE], "--checkpoint-seconds"),
    ([*SECONDS, "1e10", HERE], "at most 1e+09 seconds"),
    ([RUN, "--log-dir", HERE, HERE], "--log-dir"),
    ([RUN, "--log-dir", f"{HERE}/x", HERE], "--log-dir"),
    ([RUN, "--no-such-option", HERE], "--no-such-option"),
    ([RUN, "--trace", "{folder}", HERE], "no trace can be written to"),
    ([RUN, "--trace", "{folder}/absent/out.json", HERE], "folder that exists"),
    ([RUN, "--host", "127.0.0.1", SCRIPT], "this job has none"),
    ([*SERVER, "--host", "0.0.0.0", SCRIPT], "cannot be connected to"),
    ([*SERVER, "--host", "203.0.113.7", SCRIPT], "not an address of this machine"),
    ([RUN, "--experts", "1", "--host", "no such host", SCRIPT], "not an address of this machine"),
    ([*DIRECTORY, "redis://10.0.0.1:6379", SCRIPT], "give --host"),
    ([*DIRECTORY, "redis://127.0.0.1:port", SCRIPT], "is not a Redis address"),
    ([*DIRECTORY, "tcp://10.0.0.1:7001", SCRIPT], "requires certificates; name their folder in ANABRANCH_KEYS"),
    ([*DIRECTORY, "nonsense", SCRIPT], "for --directory: 'nonsense' is not an endpoint"),
    ([*DIRECTORY, "redis://127.0.0.1:1", "--engine", "ray", SCRIPT], "--engine ray does not use it"),
    ([RUN, "--address", "a:1", SCRIPT], "does not use it"),
    ([RUN, "--engine", "ray", "--host", "10.0.0.1", SCRIPT], "does not use it"),
    (["keys", "--days", "0", HERE], "--days"),
    (["no-such-command"], "no-such-command"),
    (["status", "{folder}/no"], "log folder"),
    (["status", "folder", "unix:/a"], "one log folder, or endpoints"),
    (["status", "--watch", "--json"], "prints once"),
    (["status", "tcp://nonsense"], "nonsense"),
    (["view", "{folder}/absent.json"], "there is no"),
    (["view", "{folder}/text.json"], "is not a trace of Anabranch"),
    (["view", "{folder}/graph.safetensors"], "nor a graph written by Graph.save"),
    (["view", "{folder}"], "give a job's log folder (--log-dir)"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_wrong_arguments_are_named_without_a_traceback(words: list[str], said: str, tmp_path: Path) -> None:
    for name, text in (("script.py", "raise SystemExit(3)"), ("text.json", "{}"), ("graph.safetensors", "nonsense")):
        (tmp_path / name).write_text(text)
    found = CliRunner().invoke(
        _app, [word.replace("{folder}", str(tmp_path)) for word in words], env={"COLUMNS": "400"}
    )
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    assert said in " ".join(found.output.replace("│", " ").split())  # its box breaks lines
