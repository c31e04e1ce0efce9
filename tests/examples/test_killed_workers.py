"""Each loop of README, the guides and the examples that several workers run survives a worker that is killed.

Where another takes its place, the steps and their losses are those of the undisturbed run. The others begin anew.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from example_jobs import EXAMPLES

from launched import run
from pages import ROOT, code_of, write_files

WRAPPER = Path(__file__).with_name("killed_once.py")


@dataclass(frozen=True)
class Loop:
    """A script, the steps behind which a worker is killed, and what else its job has.

    ``script`` is an example, a file that a page shows (``page.md: file.py``), or all code of a page.
    """

    script: str
    dies_behind: int
    arguments: str = ""
    job: str = ""
    exact: bool = True
    begins_anew: bool = False

    def write(self, folder: Path) -> Path:
        """Return the path of the script, written into the folder if a page shows it."""
        if self.script.endswith(".py") and ".md" not in self.script:
            return EXAMPLES / self.script
        page, _, name = self.script.partition(": ")
        if page == "README.md":
            (source,) = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
            (folder / name).write_text(source)
        elif name:
            write_files(page, folder)
        else:
            name = "page.py"
            (folder / name).write_text(code_of(page))
        return folder / name


CLICKS = "--steps 6 --batch 64 --lines 1000 --held-out-lines 500 --ids 50 --rows 512 --evaluate-every 3"
LOOPS = [
    Loop("README.md: script.py", 320),
    Loop("quickstart.md: first.py", 17),
    Loop("your_model.md: train.py", 110, job="--servers 1"),
    Loop("tutorials/clicks.md: clicks.py", 120, job="--servers 1"),
    Loop("tutorials/unet.md: unet.py", 20, begins_anew=True),
    Loop("all-of-anabranch.md: train.py", 11),
    Loop("index.md", 4, job="--servers 1"),
    Loop("guides/take_out.md", 12, job="--servers 1"),
    Loop("guides/loaders.md: train.py", 6),
    Loop("click_through.py", 2, CLICKS, "--servers 1"),
    Loop("graph_sage.py", 2, "--steps 6 --nodes 600 --batch 32 --double --evaluate-every 3", "--servers 1"),
    Loop("language_model.py", 2, "--steps 6 --batch 4 --memory-rows 512 --save-every 6 --text {text}"),
    Loop("mixture_of_experts.py", 30 + 20, "--steps 30", "--experts 4", exact=False),
    Loop("cluster/train.py", 4, "--steps 10 --save-every 3", "--servers 1"),
    Loop("short/tables.py", 60, job="--servers 1"),
    Loop("short/stages.py", 30, begins_anew=True),
    Loop("short/own_loop.py", 60, begins_anew=True),
    Loop("unet.py", 5, "--steps 10", begins_anew=True),
]


def ended(loop: Loop, script: Path, notes: Path, victim: int, text: Path) -> str:
    notes.mkdir()
    options = shlex.split(loop.job) + (["--max-restarts", "1"] if loop.begins_anew else [])
    arguments = shlex.split(loop.arguments.format(text=text))
    job = ["--workers", 2, "--log-dir", notes / "logs", *options]
    done = run(*job, WRAPPER, notes, victim, loop.dies_behind, script, *arguments, patient=True)
    logs = "\n".join(path.read_text() for path in sorted((notes / "logs").glob("worker-*.log")))
    assert done.returncode == 0, done.stderr + logs
    return done.stderr


def losses(notes: Path, *, alike: bool) -> tuple[dict[int, float], bool]:
    """Return the loss of each step, which all workers have seen ``alike``, and whether one that has joined saw some."""
    seen: dict[int, float] = {}
    joined = False
    for path in notes.glob("[0-9]"):
        for step, loss, newcomer in map(json.loads, path.read_text().splitlines()):
            assert seen.setdefault(step, loss) == pytest.approx(loss, rel=1e-6) or not alike
            joined |= newcomer
    return seen, joined


def test_all_examples_are_here() -> None:
    alone = {"short/experts.py", "short/graph.py"}  # of one worker
    paths = [path for folder in (".", "short", "cluster") for path in (EXAMPLES / folder).glob("[!_]*.py")]
    assert {str(path.relative_to(EXAMPLES)) for path in paths} - alone <= {loop.script for loop in LOOPS}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.script)
def test_a_loop_survives_a_worker_that_is_killed(
    loop: Loop, tmp_path: Path, small_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, victim in (("undisturbed", -1), ("killed", 0)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        said = ended(loop, loop.write(tmp_path / name), tmp_path / name / "notes", victim, small_text)
        assert ("another takes its place" in said) == (victim == 0 and not loop.begins_anew)
        assert ("restarting the job" in said) == (victim == 0 and loop.begins_anew)
    (expected, _), (seen, joined) = (
        losses(tmp_path / name / "notes", alike=loop.exact) for name in ("undisturbed", "killed")
    )
    assert seen.keys() == expected.keys()
    assert joined != loop.begins_anew
    if loop.exact:
        assert seen == pytest.approx(expected, rel=1e-5)
