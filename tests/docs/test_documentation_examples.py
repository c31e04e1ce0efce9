"""The documentation is correct: its Python runs, the errors it quotes exist, its pictures are those of the tables.

``pages.py`` says how a page runs. Pages under ``docs/with`` need other libraries: ``tests/models`` runs them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import pkgutil
import re
import runpy
import textwrap
import xml.etree.ElementTree as ET
from importlib import import_module
from pathlib import Path

import pytest

import anabranch as ab
from launched import start_launcher
from pages import DOCS, ROOT, blocks, code_of, pages, write_files

PACKAGE = Path(ab.__file__).parent
PAGES = [page for page in pages() if not page.startswith("with/")]
OF_OTHERS = {"terminate called without an active exception"}  # of the C++ runtime
_QUOTE = re.compile(r"^### `(?P<quote>.+)`$", re.MULTILINE)


def marked(page: str) -> object:
    """Tutorials train for longer than the others."""
    return pytest.param(page, marks=pytest.mark.slow) if page.startswith("tutorials/") else page


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(blocks(page))
    write_files(page, tmp_path)
    script = tmp_path / "page.py"
    script.write_text(code_of(page))
    monkeypatch.chdir(tmp_path)
    with start_launcher(script) as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors


def test_all_python_of_the_pages_is_seen() -> None:
    """Fences that the tests would pass over: indented, or in another spelling."""
    passed_over = {page: re.findall(r"^(?: +```py\w*|```(?:py|python3|pycon|ipython|{code.*))$", text, re.MULTILINE)
                   for page in pages(fence="") for text in [(DOCS / page).read_text()]}  # fmt: skip
    assert not any(passed_over.values()), passed_over
    assert {"tutorials/clicks.md", "concepts/staleness.md", "guides/graph_sage.md", "howto.md"} <= set(PAGES)


def test_code_fits_the_width_of_a_page() -> None:
    """Also of README and CONTRIBUTING; the theme cuts what is wider."""
    for path in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        blocks = re.findall(r"^```(?:python|console|text)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
        wide = [line for block in blocks for line in block.splitlines() if len(line) > 88]
        assert not wide, (path, wide)


def test_code_of_docstrings_fits_the_width_of_a_page() -> None:
    """Of what the API reference shows: doctests and literal blocks of exported names and of their members."""
    modules = [ab, *(import_module(f"anabranch.{module.name}") for module in pkgutil.iter_modules(ab.__path__))]
    exports = [getattr(module, name) for module in modules for name in getattr(module, "__all__", ())]
    members = [member for each in exports if isinstance(each, type) for member in vars(each).values()]
    wide = []
    for text in {inspect.getdoc(each) or "" for each in (*modules, *exports, *members)}:
        for block in re.findall(r"^ *>>> (?:.+\n?)+|(?<=::\n\n)(?: .*\n|\n)+", text + "\n", re.MULTILINE):
            wide += [line for line in textwrap.dedent(block).splitlines() if len(line) > 88]
    assert not wide


def test_examples_that_are_not_run_give_a_reason() -> None:
    asides = re.compile(r"^<!-- not run:?(.*) -->$", re.MULTILINE)
    found = {page: asides.findall((DOCS / page).read_text()) for page in pages()}
    assert sum(map(len, found.values())) > 5
    for page, reasons in found.items():
        assert all(re.match(r" it (is|needs|shows) \w+", reason) for reason in reasons), (page, reasons)


# Errors by their text.


@functools.cache
def templates() -> list[tuple[str, list[str]]]:
    """The texts in the sources that are not docstrings, as the pieces between what is filled in, the longest first."""
    found: list[list[str]] = []
    for path in PACKAGE.rglob("*.py"):
        told: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text())):  # an expression before its value
            if isinstance(node, ast.Expr):
                told.add(id(node.value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                found.append([node.value])
            elif isinstance(node, ast.JoinedStr):
                pieces = [""]
                for part in node.values:
                    if isinstance(part, ast.Constant):
                        pieces[-1] += str(part.value)
                    else:
                        pieces.append("")
                found.append(pieces)
    return [(longest, pieces) for pieces in found if len(longest := max(pieces, key=len)) >= 8]


def spoken(quote: str) -> float:
    """The share of ``quote`` that stands in the sources: all of it in one text, or its parts in several."""
    if any(quote in piece for _, template in templates() for piece in template):
        return 1.0
    covered: set[int] = set()
    for template in (template for longest, template in templates() if longest in quote):
        pattern = ".+?".join(f"({re.escape(piece)})" for piece in template)
        if match := re.search(pattern.removeprefix("().+?"), quote):
            for group in range(1, 1 + match.re.groups):
                covered |= set(range(*match.span(group)))
    return len(covered) / len(quote)


def quotes() -> list[str]:
    return [match["quote"] for match in _QUOTE.finditer((DOCS / "troubleshooting.md").read_text())]


def test_every_error_in_troubleshooting_is_in_the_sources() -> None:
    assert len(quotes()) > 10
    assert [quote for quote in quotes() if quote not in OF_OTHERS and spoken(quote) < 0.75] == []


@pytest.mark.parametrize(
    "quote",
    ["the moon is not in its usual place", "the operation has met its deadline", "rank 1 is lost: it went home"],
)
def test_an_error_that_is_nowhere_in_the_sources_is_seen(quote: str) -> None:
    assert spoken(quote) < 0.75


def test_a_benchmark_named_in_the_documentation_is_there() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    named = set(re.findall(r"benchmarks/(\w+\.py)", text))
    there = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert len(named) > 3
    assert named <= there


def test_tables_of_benchmarks_are_made_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without results stay as they are."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    summary = import_module("summary")
    text = (DOCS / "benchmarks.md").read_text()
    marked = re.findall(r"^% (?:table|plot) ([\w-]+): .+\n\|", text, re.MULTILINE)
    assert set(summary.TABLES) | {"experts-peers"} == set(marked)
    rows = [
        {"side": side, "median_ms": value, "min_ms": 1.0}
        for side, value in (("server", 9), ("echo", 2), ("kernels", 4))
    ]
    machine = {"cores": 2, "processor": "example", "torch": "2.13.0", "commit": "0a1b2c3d"}
    (tmp_path / "parameter_server.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    results = summary.Results(tmp_path)
    assert summary.rewritten(text, summary.Results(tmp_path / "none")) == text
    made = summary.rewritten(text, results)
    assert "| 9.0 ms (1.0) | 2.0 ms (1.0) | 4.0 ms (1.0) | 1.50 |\n" in made
    assert re.search(r"^% table shard: commit 0a1b2c3d, two cores of a virtual machine \(example\)", made, re.MULTILINE)
    assert [row["met"] for row in summary.targets(results)] == ["0 of 1"]
    pieces = (text.split("% table shard:"), made.split("% table shard:"))
    assert pieces[0][0].split("% table tape:")[1] == pieces[1][0].split("% table tape:")[1], "no result, no change"


# The walks through the sources in docs/design.md.

STOPS = re.findall(r"^\|[^|]*\| `([\w/]+\.py)` \| `([\w.]+)` \|$", (DOCS / "design.md").read_text(), re.MULTILINE)


def test_every_stop_of_the_walks_is_there() -> None:
    assert len(STOPS) > 20
    kinds = (ast.FunctionDef, ast.ClassDef)
    for file, function in STOPS:
        tree = ast.parse((PACKAGE / file).read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        names = {node.name for node in nodes}
        names |= {f"{node.name}.{inner.name}" for node in nodes for inner in node.body if isinstance(inner, kinds)}
        assert function in names, (file, function)


# The pictures: all used, in the colours of the page, and the plots those of the tables.

PICTURES = sorted((DOCS / "pictures").resolve().glob("*.svg"))
USED = [
    (page, *found)
    for page in pages(fence=".svg)\n")
    for found in re.findall(r"^!\[(.*)\]\((\S+\.svg)\)\n\n(.*)$", (DOCS / page).read_text(), re.MULTILINE)
]


def test_plots_are_those_of_the_tables() -> None:
    """After a change of docs/benchmarks.md or of the schedules: `make plots`."""
    drawn = runpy.run_path(str(ROOT / "tools/draw_plots.py"))["drawn"]()
    assert len(drawn) > 5
    for name, text in drawn.items():
        assert (DOCS / "pictures" / name).read_text() == text, f"{name} is out of date: make plots"


def test_a_plot_names_its_commit_and_its_machine() -> None:
    plots = [path.read_text() for path in PICTURES if path.name.startswith("plot-")]
    assert plots
    assert all(re.search(r"Measured with commit [0-9a-f]{8}, two cores", text) for text in plots)


def test_every_picture_is_on_a_page_and_every_page_shows_one_that_is_there() -> None:
    assert set(PICTURES) == {(DOCS / page).parent.joinpath(link).resolve() for page, _, link, _ in USED}


@pytest.mark.parametrize("folder", ["tutorials", "concepts"])
def test_a_tutorial_and_a_concept_have_a_picture(folder: str) -> None:
    there = {f"{folder}/{path.name}" for path in (DOCS / folder).glob("*.md")}
    assert len(there) >= 3
    assert there <= {page for page, _, _, _ in USED}


@pytest.mark.parametrize(("page", "alt", "link", "caption"), USED, ids=[f"{page}: {link}" for page, _, link, _ in USED])
def test_a_picture_has_a_text_description_and_a_caption(page: str, alt: str, link: str, caption: str) -> None:
    assert re.fullmatch(r"\S.{40,}\.", alt), page
    assert re.match(r"[A-Z\"`]", caption), page


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_fits_light_and_dark_pages(path: Path) -> None:
    root = ET.fromstring(path.read_text())  # our own file
    left, top, width, _ = map(float, root.attrib["viewBox"].split())
    assert (left, top) == (0, 0)
    assert width <= 460  # its words can be read on a telephone
    colours = {part.get(name) for part in root.iter() for name in ("fill", "stroke")} - {None, "none", "currentColor"}
    for colour in colours:
        red, green, blue = (int(str(colour)[i : i + 2], 16) for i in (1, 3, 5))
        brightness = 0.3 * red + 0.59 * green + 0.11 * blue
        assert 60 < brightness < 180, (path.name, colour)
