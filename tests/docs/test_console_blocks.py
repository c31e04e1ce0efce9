"""The commands of README and docs are ones that exist, with options that exist; the quickstart's are run.

Those that train an example are run by the example's own tests, ``make`` by whoever runs this.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from test_documentation_examples import blocks

from anabranch.cli.app import _app
from launched import run

HERE = Path(__file__).parents[2]
PAGES = [
    HERE / "README.md",
    HERE / "CONTRIBUTING.md",
    *sorted((HERE / "docs").glob("*.md")),
    *sorted((HERE / "docs/guides").glob("*.md")),
]
# Of other makers; that those need a network, a cluster or a file of the reader's is not for a test to change.
OTHERS = {
    "pip",
    "torchrun",
    "rm",
    "tensorboard",
    "jupyter",
    "git",
    "cd",
    "sbatch",
    "kubectl",
    "docker",
    "conda",
    "export",
    "source",
}
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z_]+=\S*$")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each page's commands, in words; synopses with brackets left out."""
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text()):
            text = block.replace("\\\n", " ")
            for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                words = shlex.split(line, comments=True)
                while words and _VARIABLE.match(words[0]):
                    words.pop(0)
                if words and not any(word == "..." or word.startswith("[-") for word in words):
                    yield page.name, words


ALL = list(commands())


def check_anabranch(words: list[str], folder: Path) -> None:
    """Parse as the command does; what it asks for on the disk is there."""
    for name in ("train.py", "first.py", "logs", "out.json", "fleet.toml", "graph.safetensors"):
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
    own = (HERE / name).read_text()
    beside = [
        (HERE / name).with_name(f"{module}.py") for module in re.findall(r"^(?:from|import) (\w+)", own, re.MULTILINE)
    ]
    source = own + "".join(path.read_text() for path in beside if path.exists())
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in source, (name, word)


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)[:60]}" for page, words in ALL])
def test_a_command_of_the_documentation_exists_with_its_options(page: str, words: list[str], tmp_path: Path) -> None:
    program, *rest = words
    if Path(program).name == "anabranch":
        check_anabranch(rest, tmp_path)
    elif program == "python":
        if rest[0].startswith(("examples/", "benchmarks/")):
            check_script(rest[0], rest[1:])
        else:
            assert rest[0] in ("train.py", "first.py", "toy.py"), words  # a file that the page itself writes
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (HERE / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
    else:
        assert program in OTHERS, words


@pytest.mark.slow
def test_the_quickstart_runs_alone_and_then_on_two_workers(tmp_path: Path) -> None:
    ((_, code),) = blocks("quickstart.md")
    (tmp_path / "first.py").write_text(code)
    words = [words for page, words in ALL if page == "quickstart.md"]
    assert [line[0] for line in words] == ["python", "rm", "anabranch"]
    with contextlib.chdir(tmp_path):
        alone = subprocess.run([sys.executable, *words[0][1:]], capture_output=True, text=True, timeout=100, check=True)
        subprocess.run(words[1], check=True, timeout=50)
        together = run(*words[2][2:])
    assert together.returncode == 0, together.stderr
    assert alone.stdout == together.stdout == "trained for 40 steps\n"
    assert os.listdir(tmp_path / "runs" / "first")


@pytest.mark.slow
def test_the_newcomer_s_model_trains_alone_and_with_a_server_alike(tmp_path: Path) -> None:
    ((_, code),) = blocks("your_model.md")
    (tmp_path / "train.py").write_text(code)
    words = [words for page, words in ALL if page == "your_model.md"]
    assert [line[0] for line in words] == ["python", "rm", "anabranch"]
    with contextlib.chdir(tmp_path):
        alone = subprocess.run([sys.executable, *words[0][1:]], capture_output=True, text=True, timeout=100, check=True)
        subprocess.run(words[1], check=True, timeout=50)
        together = run(*words[2][2:])
    assert together.returncode == 0, together.stderr
    losses = [[float(line.split()[-1]) for line in done.stdout.splitlines()] for done in (alone, together)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
    assert losses[0][-1] < 0.2
