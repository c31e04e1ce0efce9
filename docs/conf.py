"""How Sphinx builds these pages: Markdown by MyST, the reference from the docstrings."""

from __future__ import annotations

import importlib
import os
import pkgutil
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

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

# One page a package, so that a new package is in the reference without anybody listing it.
REFERENCE = Path(__file__).parent / "reference"


def write_reference(app: Sphinx) -> None:
    """Writes the pages of the reference, leaving those that are as they should be."""
    REFERENCE.mkdir(exist_ok=True)
    names = [module.name for module in pkgutil.iter_modules(anabranch.__path__) if not module.name.startswith("_")]
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
    home = {exported: getattr(getattr(module, exported), "__module__", name) for exported in module.__all__}
    foreign = {exported: where.split(".")[1] for exported, where in home.items() if _is_foreign(where, name)}
    lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: anabranch.{name}"]
    if own := [exported for exported in home if exported not in foreign]:
        lines += [f"   :members: {', '.join(own)}", "   :show-inheritance:"]
    lines += ["```", ""]
    lines += [f"- `{exported}`: see [{package}]({package}.md)" for exported, package in foreign.items()]
    return "\n".join(lines) + "\n"


def table_of_names() -> str:
    """A line for each name of ``import anabranch as ab``, linked; ``api.md`` includes it."""
    lines = ["| `ab.` | |", "|---|---|"]
    for name in sorted(anabranch.__all__, key=str.lower):
        found = getattr(anabranch, name)
        home = f"{found.__module__.split('.')[1]}.{name}" if hasattr(found, "__module__") else name
        role = "obj" if hasattr(found, "__module__") else "mod"
        first = " ".join((found.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|").replace("``", "`")
        lines.append(f"| {{py:{role}}}`{name} <anabranch.{home}>` | {first} |")
    return "\n".join(lines) + "\n"


def _is_foreign(where: str, package: str) -> bool:
    return where.startswith("anabranch.") and not f"{where}.".startswith(f"anabranch.{package}.")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_reference)
