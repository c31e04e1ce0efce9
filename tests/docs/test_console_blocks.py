"""The commands of README and docs are run, or are of a kind that ``NOT_RUN`` gives the reason for.

Those that are not run exist, with options that exist. A page whose commands are run shows what they print.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from anabranch.cli.app import _app
from launched import run
from pages import DOCS, ROOT, commands, pages, write_files

RUN = ["quickstart.md", *(page for page in pages(fence="```console\n") if page.startswith("tutorials/"))]
SHOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS / page for page in pages(fence="```console\n"))]
# The first that fits. What else tests the command, where something does, is a file that is there.
NOT_RUN = (
    (r".*\bexamples/language_model", "its own tests train it", "tests/examples/test_language_model.py"),
    (r".*\bexamples/click_through", "its own tests train it", "tests/examples/test_click_through.py"),
    (r".*\bexamples/graph_sage", "its own tests train it", "tests/examples/test_graph_sage.py"),
    (r".*\bbenchmarks/", "minutes of two free cores; `make bench` runs it", "Makefile"),
    (r"make ", "runs these tests, or is run by continuous integration beside them", ".ci/run"),
    (r"(pip|git|conda|docker) ", "needs a network", None),
    (r"(sbatch|kubectl|cd|export|rm|torchrun --nnodes) ?", "needs a cluster", "tests/launch/test_cluster_files.py"),
    (r"anabranch keys ", "its own tests run it", "tests/transport/test_security.py"),
    (r"anabranch serve ", "does not end", "tests/experts/test_serving.py"),
    (r"anabranch experts ", "needs servers", "tests/experts/test_serving.py"),
    (r"anabranch (status|view)\b", "needs a job that runs", "tests/launch/test_status.py"),
    (r"anabranch run .*--engine ray", "needs Ray", "tests/launch/ray"),
    (r"anabranch run .*--trace ", "its own tests run it", "tests/launch/test_job_trace.py"),
    (r"(python|anabranch run .*|torchrun .*) ?train.py", "stands for the reader's file", "tests/launch/test_launch.py"),
)  # fmt: skip
_VARIABLE = re.compile(r"[A-Z_]+=\S*$")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def without_variables(line: str) -> list[str]:
    words = shlex.split(line)
    while words and _VARIABLE.match(words[0]):
        words.pop(0)
    return words


def listed() -> Iterator[tuple[str, list[str]]]:
    """Each page's commands that are not run, in words; synopses with brackets left out."""
    for path in SHOWN:
        for line, _ in commands(path):
            words = without_variables(line)
            synopsis = any(word == "..." or word.startswith("[-") for word in words)
            if words and not synopsis and path not in [DOCS / page for page in RUN]:
                yield path.name, words


ALL = list(listed())


def check_anabranch(words: list[str], folder: Path) -> None:
    """Parse as the command does; what it asks for on the disk is there."""
    for name in ("train.py", "first.py", "logs", "out.json", "graph.safetensors"):
        (folder / name).touch()
    (folder / "keys").mkdir()
    for word in words:
        if word.startswith(("examples/", "benchmarks/")):
            check_script(word, words[words.index(word) + 1 :])
            (folder / word).parent.mkdir(exist_ok=True)
            (folder / word).touch()
    command = typer.main.get_command(_app)
    context = command.make_context("anabranch", [], resilient_parsing=True)
    with contextlib.chdir(folder):
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        with command.make_context(str(command.name), words, parent=context):
            pass


def check_script(name: str, arguments: list[str]) -> None:
    """The file is there, and it or a file that it imports beside it knows the options."""
    own = (ROOT / name).read_text()
    beside = [
        (ROOT / name).with_name(f"{module}.py") for module in re.findall(r"^(?:from|import) (\w+)", own, re.MULTILINE)
    ]
    source = own + "".join(path.read_text() for path in beside if path.exists())
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in source, (name, word)


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)[:60]}" for page, words in ALL])
def test_a_command_that_is_not_run_exists_with_its_options_and_has_a_reason(
    page: str, words: list[str], tmp_path: Path
) -> None:
    reasons = [(why, tested) for pattern, why, tested in NOT_RUN if re.match(pattern, " ".join(words))]
    assert reasons, f"run {' '.join(words)!r} of {page} in a test, or say in NOT_RUN why not"
    assert reasons[0][1] is None or (ROOT / reasons[0][1]).exists()
    program, *rest = words
    if Path(program).name == "anabranch":
        check_anabranch(rest, tmp_path)
    elif program == "python" and rest[0].startswith(("examples/", "benchmarks/")):
        check_script(rest[0], rest[1:])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)


def test_each_reason_is_one_of_a_command() -> None:
    used = {next((p for p, _, _ in NOT_RUN if re.match(p, " ".join(words))), None) for _, words in ALL}
    assert [pattern for pattern, _, _ in NOT_RUN if pattern not in used] == []


def ran(line: str) -> str:
    """What a command prints. `anabranch run` is the launcher of the tests, which starts quicker."""
    program, *rest = shlex.split(line)
    if program == "anabranch":
        assert rest.pop(0) == "run"
        ended = run(*rest, timeout=200)
    else:
        words = [sys.executable if program == "python" else program, *rest]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def alike(printed: str, shown: str) -> None:
    """The same words, and numbers within a hundredth: rounding differs between processors."""
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", shown)
    numbers = [[float(found[0]) for found in _NUMBER.finditer(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=0.002)


@pytest.mark.slow
@pytest.mark.timeout(600)  # up to three jobs, one after the other
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_print_the_output_shown(page: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    found = list(commands(DOCS / page))
    assert {"python", "anabranch"} <= {line.split()[0] for line, _ in found}
    with contextlib.chdir(tmp_path):
        for line, shown in found:
            alike(ran(line), shown)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_newcomer_s_model_trains_alone_and_with_a_server_alike(tmp_path: Path) -> None:
    write_files("your_model.md", tmp_path)
    lines = [line for line, _ in commands(DOCS / "your_model.md")]
    assert [line.split()[0] for line in lines] == ["python", "rm", "anabranch"]
    with contextlib.chdir(tmp_path):
        alone, _, together = map(ran, lines)
    losses = [[float(line.split()[-1]) for line in printed.splitlines()] for printed in (alone, together)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
    assert losses[0][-1] < 0.2
