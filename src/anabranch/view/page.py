"""One page of HTML that holds its data, its script and its style, and loads nothing."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Literal


def page_of(kind: Literal["run", "graph"], title: str, data: object) -> str:
    """Return the page.

    >>> page = page_of("run", "<b>", {"name": "</script>"})
    >>> "<title>&lt;b&gt;</title>" in page, page.count("</script>")
    (True, 2)

    Args:
        kind: which script draws it.
        title: any text.
        data: plain values; texts in it may hold anything, for the script never takes them for HTML.

    Raises:
        ValueError: a number in it is NaN or infinite, which JSON cannot say.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(title),
        "style": _asset("page.css"),
        "body": _asset(f"{kind}.html"),
        # Without "<" nothing in it can end the element that carries it, or begin a comment.
        "data": text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "script": _asset("common.js") + _asset(f"{kind}.js"),
    }
    # What is put in is not looked at again.
    return "".join(parts.get(piece, piece) for piece in _asset("page.html").split("@@"))


def _asset(name: str) -> str:
    return resources.files("anabranch.view").joinpath("assets", name).read_text(encoding="utf-8")
