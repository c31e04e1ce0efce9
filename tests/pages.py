"""The pages of the documentation, and the code and commands on them.

A page reads as one story, so its ```python blocks run in order and share their names, in a directory of their own. A
block whose first line is a comment with a file's name is written to that file too, for later blocks to run as a script.
``<!-- not run: <why> -->`` above a block leaves it out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
Command = tuple[str, str]
"""A line after ``$``, and the output that the page shows."""

_BLOCK = re.compile(r"^(?P<above>[^\n]*)\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (?P<name>\w+\.py)\n")
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MADE = ("_build", "reference")  # by the build of the documentation


def pages(*, fence: str = "```python\n") -> list[str]:
    """Names of all pages with such a fence, as ``guides/training.md``."""
    found = [path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))]
    return [str(name) for name in found if name.parts[0] not in _MADE and fence in (DOCS / name).read_text()]


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the code of each block of ``page`` that is to be run."""
    text = (DOCS / page).read_text()
    for match in _BLOCK.finditer(text):
        if not match["above"].startswith("<!-- not run: "):
            yield text.count("\n", 0, match.start("code")), match["code"]


def code_of(page: str) -> str:
    """Return the blocks of ``page`` as one script, each at its own line, so that tracebacks show the page's lines."""
    lines: list[str] = []
    for line, code in blocks(page):
        lines += [""] * (line - len(lines)) + code.splitlines()
    return "\n".join(lines) + "\n"


def write_files(page: str, folder: Path) -> None:
    """Write the blocks of ``page`` that begin with a file's name to that file."""
    for _, code in blocks(page):
        if named := _FILE.match(code):
            (folder / named["name"]).write_text(code)


def commands(path: Path) -> Iterator[Command]:
    """Yield the commands of a page's console blocks, continued lines joined."""
    for block in _CONSOLE.findall(path.read_text()):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            line, _, printed = part.partition("\n")
            yield shlex.join(shlex.split(line, comments=True)), printed
