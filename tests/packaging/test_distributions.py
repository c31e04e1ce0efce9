"""The source archive and the wheel hold what a user needs and nothing else, and work alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 240.0

pytestmark = pytest.mark.slow

TRAINS = """
import sys

import torch
from torch import nn

import anabranch as ab

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
model = nn.Linear(4, 1)
step = ab.TrainStep(model, lambda model, x: (model(x) - x.sum(1, keepdim=True)).square().mean(),
                    torch.optim.Adam(model.parameters(), lr=0.1))
job = ab.job()
with ab.Executor({"train": step}, comm_mode="AllReduce", engine="graph") as executor:
    first = executor.run("train", inputs[job.rank :: job.world_size])["loss"]
    for _ in range(20):
        last = executor.run("train", inputs[job.rank :: job.world_size])["loss"]
    assert last < first
    if job.rank == 0:
        executor.graph("train").to_html("graph.html")
        print("trained with", ab.__file__)
"""


def check(command: list[str | Path], folder: Path) -> str:
    """Run a command to its end, without what points at this checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=LIMIT, cwd=folder, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the build backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("backend")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
    check([*pip, "-c", ROOT / "constraints.txt", "hatchling"], folder)
    return folder


def build(kind: str, source: Path, out: Path, backend: Path) -> Path:
    code = (
        f"import sys; sys.path.insert(0, sys.argv[1]); import hatchling.build as b; print(b.build_{kind}(sys.argv[2]))"
    )
    return out / check([sys.executable, "-c", code, backend, out], source).splitlines()[-1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, backend: Path) -> Path:
    """The source archive, unpacked."""
    out = tmp_path_factory.mktemp("archive")
    with tarfile.open(build("sdist", ROOT, out, backend)) as file:
        file.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, archive: Path, backend: Path) -> Path:
    """Built from the archive, as installers do."""
    return build("wheel", archive, tmp_path_factory.mktemp("wheel"), backend)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A virtual environment with the wheel, that borrows what it depends on, and does not see this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    check([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-deps"]
    check([*pip, "--no-index", "--disable-pip-version-check", wheel], folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth names has its own .pth files passed over: the editable install among them.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", folder], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(listed.stdout.splitlines())


def test_the_wheel_holds_the_package_and_its_licence_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == {name.removeprefix("src/") for name in tracked("src/anabranch")}
    assert {"anabranch/py.typed", "anabranch/view/assets/run.js", "anabranch/view/assets/page.css"} < names
    ends = {name.split(".dist-info/")[1] for name in metadata}
    assert ends == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def test_the_archive_holds_tracked_files_and_those_that_the_readme_runs(archive: Path) -> None:
    held = {str(path.relative_to(archive)) for path in archive.rglob("*") if path.is_file()}
    assert held - {"PKG-INFO", ".gitignore"} <= tracked(".")
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "tools"):
        assert tracked(folder) <= held
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"} <= held


def test_it_is_imported_and_started_where_only_the_wheel_is_installed(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin/python"
    where = check([python, "-c", "import anabranch; print(anabranch.__file__)"], tmp_path)
    assert where.startswith(str(environment))
    assert "anabranch run --workers 4 train.py" in check([environment / "bin/anabranch", "--help"], tmp_path)


def test_it_trains_and_draws_where_only_the_wheel_is_installed(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    said = check([environment / "bin/anabranch", "run", "--workers", "2", "train.py"], tmp_path)
    assert f"trained with {environment}" in said
    assert "<script" in (tmp_path / "graph.html").read_text()
