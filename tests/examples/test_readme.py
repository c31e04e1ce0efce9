"""The README's example runs as printed, with the results that the README describes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from launched import run

ROOT = Path(__file__).parents[2]


TEXT = (ROOT / "README.md").read_text()
PRINTED = re.compile(r"step (\d+)  loss (\S+)")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's only program, in a folder of its own, which is the current one."""
    (source,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(source)
    return path


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in PRINTED.findall(printed)}


def as_job(script: Path, workers: int = 1) -> str:
    ended = run("--workers", workers, script)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_it_prints_the_same_on_one_worker_and_on_four(script: Path) -> None:
    said = losses(TEXT)
    assert list(said) == [200, 400, 600, 800, 1000]
    for workers in (1, 4):
        shutil.rmtree("runs", ignore_errors=True)
        assert losses(as_job(script, workers)) == pytest.approx(said, rel=0, abs=2e-6)


@pytest.mark.slow
def test_it_resumes_where_ctrl_c_ended_it_and_stops_at_its_end(script: Path) -> None:
    source = script.read_text()
    loop = "    while executor.epoch < 100 and not executor.stopping:\n"
    press = "        if executor.step == 300:\n            signal.raise_signal(signal.SIGINT)\n"
    assert loop in source
    script.write_text(source.replace(loop, loop + press))
    assert list(losses(as_job(script))) == [200]
    script.write_text(source)
    rest = {step: loss for step, loss in losses(TEXT).items() if step > 200}
    assert losses(as_job(script, workers=2)) == pytest.approx(rest, rel=0, abs=2e-6)
    assert as_job(script) == "finished before, after step 1000; delete runs/toy to train anew\n"


def test_every_file_the_readme_points_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
