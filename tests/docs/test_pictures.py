"""The pictures of the documentation: all used, in the colours of the page, and the plots those of the tables."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pages import DOCS, ROOT, pages

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
