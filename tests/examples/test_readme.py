"""The README's example runs as printed, and means what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anabranch.testing import LocalJob

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (source,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(source)
    return script


def test_the_example_ends_alike_on_one_worker_and_on_three(example, tmp_path):
    losses = []
    for workers in (1, 3):
        directory = tmp_path / str(workers)
        directory.mkdir()
        script = directory / "script.py"
        script.write_text(example.read_text().replace("runs/toy", str(directory / "toy")))
        log = LocalJob(workers=workers, timeout=100).run(script).check().logs[0]
        losses.append(float(re.fullmatch(r"loss (\S+)", log.strip())[1]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0] < 0.3


def test_every_file_the_readme_points_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
