"""What the library shows to type checkers fits what examples and guides do with it: mypy and pyright pass on both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_documentation_examples import PAGES

import anabranch as ab
from pages import code_of

pytestmark = pytest.mark.slow  # both checkers read all of PyTorch: half a minute each
EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCES = Path(ab.__file__).parents[1]

# A page is one story whose names come again, and prints the .grad that it knows to be there; pages and examples call
# modules, whose results are Any to PyTorch, and functions of PyTorch without annotations.
_MYPY_PAGES = ["--check-untyped-defs", "--allow-redefinition-new", "--no-strict-optional"]
_MYPY_PAGES += ["--disable-error-code=no-redef"]
_MYPY_EXAMPLES = ["--strict", "--allow-untyped-calls", "--no-warn-return-any"]
_NOT_OF_PAGES = (
    "reportIncompatibleMethodOverride",  # torch.autograd.Function's own
    "reportOptionalMemberAccess",
    "reportOptionalSubscript",
    "reportPossiblyUnboundVariable",
    "reportRedeclaration",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Python of each page as a file, every block at its page's own lines."""
    folder = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        name = page.removesuffix(".md").replace("/", "_").replace("-", "_")
        (folder / f"{name}.py").write_text(code_of(page))
    return folder


def run_mypy(tmp_path: Path, folder: Path, options: list[str]) -> None:
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nmypy_path = {SOURCES}\nignore_missing_imports = True\n")
    files = sorted(map(str, folder.rglob("*.py")))
    command = [sys.executable, "-m", "mypy", f"--config-file={settings}", *options, *files]
    found = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=folder, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def run_pyright(tmp_path: Path, folder: Path, left_out: tuple[str, ...] = ()) -> None:
    settings = tmp_path / "pyrightconfig.json"
    chosen = {"include": [str(folder)], "extraPaths": [str(SOURCES), str(folder)], "typeCheckingMode": "standard"}
    settings.write_text(json.dumps(chosen | dict.fromkeys(left_out, False)))
    command = [sys.executable, "-m", "basedpyright", f"--project={settings}", f"--pythonpath={sys.executable}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 errors" in found.stdout


def test_mypy_passes_strictly_on_the_examples(tmp_path: Path) -> None:
    run_mypy(tmp_path, EXAMPLES, _MYPY_EXAMPLES)


def test_pyright_passes_on_the_examples(tmp_path: Path) -> None:
    run_pyright(tmp_path, EXAMPLES)


def test_mypy_passes_on_the_pages(tmp_path: Path, pages: Path) -> None:
    run_mypy(tmp_path, pages, _MYPY_PAGES)


def test_pyright_passes_on_the_pages(tmp_path: Path, pages: Path) -> None:
    run_pyright(tmp_path, pages, _NOT_OF_PAGES)


@pytest.mark.parametrize("checker", [run_mypy, run_pyright])
def test_they_do_look(tmp_path: Path, checker) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "wrong.py").write_text('import anabranch as ab\n\nab.Cache(policy=3)\nab.pipeline.NoChunk(of="nothing")\n')
    given = (tmp_path, wrong, []) if checker is run_mypy else (tmp_path, wrong)
    with pytest.raises(AssertionError, match=r"wrong\.py"):
        checker(*given)
