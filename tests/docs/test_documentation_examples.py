"""The documentation says what is so: its Python runs, and the errors it quotes exist.

A page reads as one story, so its ```python blocks run in order and share their names, in a directory of their own. A
block whose first line is a comment with a file's name is written to that file too, for later blocks to run as a script.
``% not run: <why>`` above a block leaves it out.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch as ab
from launched import start_launcher

ROOT = Path(ab.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "all-of-anabranch.md",
    "coming_from.md",
    "howto.md",
    "quickstart.md",
    "your_model.md",
    "guides/training.md",
    "guides/checkpoints.md",
    "guides/experts.md",
    "guides/gradients.md",
    "guides/graph.md",
    "guides/launch.md",
    "guides/observe.md",
    "guides/parameter_server.md",
    "guides/pipeline.md",
    "guides/transport.md",
)

_BLOCK = re.compile(r"^(?P<above>[^\n]*)\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (?P<name>\w+\.py)\n")
_QUOTE = re.compile(r"^### `(?P<quote>.+)`$", re.MULTILINE)


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """The line at which each block of ``page`` that is to be run starts, and its code."""
    text = (DOCS / page).read_text()
    for match in _BLOCK.finditer(text):
        if not match["above"].startswith("% not run: "):
            yield text.count("\n", 0, match.start("code")), match["code"]


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(blocks(page))
    assert found
    lines: list[str] = []
    for line, code in found:
        if named := _FILE.match(code):
            (tmp_path / named["name"]).write_text(code)
        # Each block at its own line, so that a traceback shows the page's.
        lines += [""] * (line - len(lines)) + code.splitlines()
    script = tmp_path / "page.py"
    script.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with start_launcher(script) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


# Errors by their text.


@functools.cache
def templates() -> list[list[str]]:
    """The texts in the sources that are not docstrings, each as the pieces between what is filled in."""
    found: list[list[str]] = []
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                found.append([node.value])
            elif isinstance(node, ast.JoinedStr):
                pieces = [""]
                for part in node.values:
                    if isinstance(part, ast.Constant):
                        pieces[-1] += str(part.value)
                    else:
                        pieces.append("")
                found.append(pieces)
    return found


def spoken(templates: list[list[str]], quote: str) -> float:
    """The share of ``quote`` that stands in the sources: all of it in one text, or its parts in several."""
    if any(quote in piece for template in templates for piece in template):
        return 1.0
    covered: set[int] = set()
    for template in templates:
        if max(map(len, template)) < 8 or max(template, key=len) not in quote:
            continue
        pattern = ".+?".join(f"({re.escape(piece)})" for piece in template)
        if match := re.search(pattern.removeprefix("().+?"), quote):
            for group in range(1, 1 + match.re.groups):
                covered |= set(range(*match.span(group)))
    return len(covered) / len(quote)


def quotes() -> list[str]:
    return [match["quote"] for match in _QUOTE.finditer((DOCS / "troubleshooting.md").read_text())]


def test_every_error_in_troubleshooting_is_in_the_sources() -> None:
    known = templates()
    assert len(quotes()) > 10
    assert [quote for quote in quotes() if spoken(known, quote) < 0.75] == []


@pytest.mark.parametrize(
    "quote",
    ["the moon is not in its usual place", "the operation has met its deadline", "rank 1 is lost: it went home"],
)
def test_an_error_that_is_nowhere_in_the_sources_is_seen(quote: str) -> None:
    assert spoken(templates(), quote) < 0.75


def test_a_benchmark_named_in_the_documentation_is_there() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    named = set(re.findall(r"benchmarks/(\w+\.py)", text))
    there = {path.name for path in (DOCS.parent / "benchmarks").glob("*.py")}
    assert len(named) > 3
    assert named <= there
