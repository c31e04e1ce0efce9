"""How Sphinx builds these pages: Markdown by MyST, the reference from the docstrings."""

from __future__ import annotations

import html
import importlib
import os
import pkgutil
import re
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

import anabranch

project = "Anabranch"
author = "the Anabranch authors"
copyright = author
version = release = installed_version("anabranch")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
if "DOCS_LINK_OUT" in os.environ:  # the pages are built without a network otherwise
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "reference/_*"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "Anabranch"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
html_baseurl = os.environ.get(
    "DOCS_URL", ""
)  # where the pages will lie; cards on other sites need it
HERE = Path(__file__).parent
CARD = "card.png"  # drawn from _static/card.svg
# What readers type into the search box first, and the page that they are to find.
SEARCHES = {
    "quickstart": "quickstart",
    "mixed precision": "howto",
    "tensorboard": "guides/observe",
    "early stopping": "howto",
    "lightning": "with/lightning",
    "lora": "with/lora",
}

# One page a package that lists what it exports, so that a new one is in the reference without anybody listing it, and
# a page for each module that such names come from.
MODULES = [module.name for module in pkgutil.iter_modules(anabranch.__path__)]
REFERENCE = HERE / "reference"


def write_reference(app: Sphinx) -> None:
    """Writes the pages of the reference, leaving those that are as they should be."""
    REFERENCE.mkdir(exist_ok=True)
    found = [importlib.import_module(f"anabranch.{name}") for name in MODULES]
    homes = {
        getattr(getattr(module, name), "__module__", None)
        for module in (anabranch, *found)
        for name in getattr(module, "__all__", ())
    }
    names = [
        name
        for name, module in zip(MODULES, found, strict=True)
        if getattr(module, "__all__", module.__name__ in homes)
    ]
    pages = {f"{name}.md": page(name) for name in names}
    pages["_names.md"] = table_of_names()
    for stale in {path.name for path in REFERENCE.glob("*.md")} - set(pages):
        (REFERENCE / stale).unlink()
    for name, text in pages.items():
        path = REFERENCE / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def page(name: str) -> str:
    """The page of one package; what it hands on from another package is described there and named here."""
    module = importlib.import_module(f"anabranch.{name}")
    own = [
        each
        for each, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    exports = getattr(
        module, "__all__", [each for each in own if not each.startswith("_")]
    )
    home = {
        exported: getattr(getattr(module, exported), "__module__", name)
        for exported in exports
    }
    foreign = {
        exported: where.split(".")[1]
        for exported, where in home.items()
        if _is_foreign(where, name)
    }
    lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: anabranch.{name}"]
    if own := [exported for exported in home if exported not in foreign]:
        lines += [f"   :members: {', '.join(own)}", "   :show-inheritance:"]
    lines += ["```", ""]
    lines += [
        f"- `{exported}`: see [{package}]({package}.md)"
        for exported, package in foreign.items()
    ]
    return "\n".join(lines) + "\n"


def table_of_names() -> str:
    """A line for each name of ``import anabranch as ab``, linked; ``api.md`` includes it."""
    lines = ["| `ab.` | |", "|---|---|"]
    for name in sorted(anabranch.__all__, key=str.lower):
        found = getattr(anabranch, name)
        home = (
            f"{found.__module__.split('.')[1]}.{name}"
            if hasattr(found, "__module__")
            else name
        )
        role = "obj" if hasattr(found, "__module__") else "mod"
        first = (
            " ".join((found.__doc__ or "").split("\n\n")[0].split())
            .replace("|", "\\|")
            .replace("``", "`")
        )
        lines.append(f"| {{py:{role}}}`{name} <anabranch.{home}>` | {first} |")
    return "\n".join(lines) + "\n"


def _is_foreign(where: str, package: str) -> bool:
    return where.startswith("anabranch.") and not f"{where}.".startswith(
        f"anabranch.{package}."
    )


class Pictures(SphinxTransform):
    """Put an SVG, with the paragraph below it as its caption, into the page itself, so that it has the page's colours."""

    default_priority = 200  # before Sphinx numbers figures and collects images

    def apply(self, **_: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.document["source"]).parent / image["uri"]
            if path.suffix == ".svg":
                self.env.note_dependency(str(path))
                label = html.escape(image["alt"])
                drawn = path.read_text().replace(
                    'role="img"', f'role="img" aria-label="{label}"', 1
                )
                words = image.parent.next_node(descend=False, siblings=True)
                words.parent.remove(words)
                figure = nodes.figure(classes=["picture"])
                figure += nodes.raw("", drawn, format="html")
                figure += nodes.caption("", "", *words.children)
                image.parent.replace_self(figure)


def add_card(
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Give a page what other sites show of a link to it: its title, its first paragraph and the project's picture."""
    if doctree is None:
        return
    first = next(
        (node.astext() for node in doctree.findall(nodes.paragraph)), ""
    ).replace("\n", " ")
    image = (
        f"{html_baseurl}_static/{CARD}"
        if html_baseurl
        else context["pathto"](f"_static/{CARD}", 1)
    )
    facts = {
        "og:type": "article",
        "og:site_name": project,
        "og:title": str(context["title"]),
        "og:description": first[:200],
        "og:image": image,
        "twitter:card": "summary_large_image",
    }
    tags = [
        f'<meta property="{name}" content="{html.escape(value)}">'
        for name, value in facts.items()
    ]
    tags.append(f'<meta name="description" content="{html.escape(first[:200])}">')
    context["metatags"] = "\n".join([str(context.get("metatags", "")), *tags])


def check_searches(app: Sphinx, failure: Exception | None) -> None:
    """Complain of words that lead nowhere: the search box looks them up in the index that was just written."""
    index = getattr(app.builder, "indexer", None)
    if failure or index is None:
        return
    for words, wanted in SEARCHES.items():
        for word in words.split():
            stem = index.lang.stem(word)
            if wanted not in index._mapping.get(stem, set()) | index._title_mapping.get(
                stem, set()
            ):
                logging.getLogger(__name__).warning(
                    "searching for %r does not find %s", words, wanted
                )


def check_figures(app: Sphinx, failure: Exception | None) -> None:
    """Complain of a figure without a caption, and of one whose caption goes on where its description was cut."""
    for path in Path(app.outdir).rglob("*.html"):
        for figure in path.read_text().split('<figure class="picture')[1:]:
            match = re.search(
                r'aria-label="(.*?)".*?caption-text">(.*?)</p>', figure, re.DOTALL
            )
            alt, caption = (
                re.sub("<.*?>", "", part).strip(" \n¶") for part in match.groups()
            )
            tails = [alt.split(" ", n)[-1] for n in range(alt.count(" ") + 1)]
            if not alt.endswith(".") or not caption or caption.startswith(tuple(tails)):
                logging.getLogger(__name__).warning(
                    "%s: a figure's caption %r beside the description %r",
                    path,
                    caption,
                    alt,
                )


def leave_notes_out(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keep the first sentence of a package's docstring: the rest tells maintainers which file does what."""
    if what == "module" and hasattr(obj, "__path__"):
        first = " ".join(lines).partition(". ")[0].strip().removesuffix(".")
        lines[:] = [f"{first}.", ""]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_transform(Pictures)
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", leave_notes_out)
    app.connect("html-page-context", add_card)
    app.connect("build-finished", check_searches)
    app.connect("build-finished", check_figures)
