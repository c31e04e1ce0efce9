"""The pages of the documentation on other libraries run; nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_ray import ray_folder

from pages import ROOT, blocks, code_of, pages, write_files

ON_RAY = "with/ray_train.md"
WITHOUT_SPACE = pytest.mark.skipif(
    " " in sys.executable, reason="Ray gives a shell the path of Python with its space unquoted"
)
PAGES = [page for page in pages() if page.startswith("with/")]
# The operators of torchvision that do not load here are declared first, as for the models of the other tests.
START = """
import runpy
import real_models

real_models._missing_operators()
runpy.run_path("page.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[WITHOUT_SPACE] if page == ON_RAY else []) for page in PAGES]
)
def test_a_page_on_another_library_runs(page: str, tmp_path: Path) -> None:
    assert list(blocks(page))
    write_files(page, tmp_path)
    (tmp_path / "page.py").write_text(code_of(page))
    folders = [ROOT / "src", ROOT / "tests", ROOT / "tests/models"]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "MPLCONFIGDIR": str(tmp_path)}
    command = [sys.executable, "-c", START]
    with ray_folder() as folder:
        ended = subprocess.run(
            command, cwd=tmp_path, env=variables | folder, capture_output=True, text=True, timeout=600, check=False
        )
    assert ended.returncode == 0, ended.stderr


def test_there_are_pages() -> None:
    assert len(PAGES) >= 6
    assert ON_RAY in PAGES
