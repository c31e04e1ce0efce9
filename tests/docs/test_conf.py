"""The build of the documentation: its search finds pages, and a link to a page has a card."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docutils import nodes
from docutils.utils import new_document

from pages import DOCS


@pytest.fixture(scope="module")
def conf() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "conf.py"))


def test_the_reference_has_a_page_for_what_exports_names(
    conf: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(conf["write_reference"].__globals__, "REFERENCE", tmp_path)
    conf["write_reference"](None)
    assert {"graph.md", "job.md", "_names.md"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "liveness.md").exists()  # its __all__ is empty
    assert "provide" not in (tmp_path / "job.md").read_text()


def complaints(conf: dict[str, Any], check: str, app: SimpleNamespace) -> list[str]:
    """What a check of the build's warns of."""
    texts: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: texts.append(text % values))
    conf[check].__globals__["logging"] = SimpleNamespace(getLogger=lambda name: logger)  # of sphinx.util
    conf[check](app, None)
    return texts


def test_a_search_that_finds_nothing_is_complained_of(conf: dict[str, Any]) -> None:
    words = {word: {page} for text, page in conf["SEARCHES"].items() for word in text.split()}
    for index, expected in (
        (words, []),
        (words | {"tensorboard": {"faq"}}, ["searching for 'tensorboard' does not find guides/observe"]),
    ):
        indexer = SimpleNamespace(lang=SimpleNamespace(stem=str), _mapping=index, _title_mapping={})
        assert complaints(conf, "check_searches", SimpleNamespace(builder=SimpleNamespace(indexer=indexer))) == expected
    assert {"quickstart", "mixed precision", "tensorboard"} <= set(conf["SEARCHES"])
    assert all((DOCS / f"{page}.md").exists() for page in conf["SEARCHES"].values())


@pytest.mark.parametrize(
    ("alt", "caption", "complained"),
    [
        ("A step, and its edges.", "Four <b>kinds</b> of edges.", False),
        ("A step, and its edges.", "", True),
        ("A step, and", "its edges.", True),
        ("A step, and its edges.", "its edges. Four kinds.", True),
    ],
)
def test_a_caption_that_is_empty_or_the_rest_of_the_description_is_complained_of(
    conf: dict[str, Any], tmp_path: Path, alt: str, caption: str, complained: bool
) -> None:
    (tmp_path / "page.html").write_text(
        f'<figure class="picture"><svg aria-label="{alt}"></svg><figcaption>\n'
        f'<p><span class="caption-text">{caption}</span><a class="headerlink">¶</a></p></figcaption></figure>'
    )
    assert bool(complaints(conf, "check_figures", SimpleNamespace(outdir=tmp_path))) == complained


@pytest.mark.parametrize(
    ("base", "image"), [("", "../_static/card.png"), ("https://x.org/", "https://x.org/_static/card.png")]
)
def test_a_page_has_a_card(conf: dict[str, Any], base: str, image: str) -> None:
    document = new_document("page")
    document += nodes.paragraph("", 'Says "what" it is.')
    context: dict[str, Any] = {"title": "Page", "pathto": lambda path, _: f"../{path}"}
    conf["add_card"].__globals__["html_baseurl"] = base
    conf["add_card"](None, "tutorials/page", "", context, document)
    assert f'<meta property="og:image" content="{image}">' in context["metatags"]
    assert "Says &quot;what&quot; it is." in context["metatags"]
    assert (DOCS / "_static/card.png").exists()
