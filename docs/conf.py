"""The documentation as a site: ``sphinx-build -EW --keep-going -c docs . build/site``.

The source is the whole repository: a link between two pages, to CONTRIBUTING.md or to a file of
code is the same on the site and where the repository is shown. The site's own parts are made from
the pages themselves: its menu from the list of pages in docs/README.md, the reference from the
names in docs/public_names.txt, and the settings and options of docs/commands.md from the program.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

from gaupipe import __version__
from gaupipe.settings.page import page as all_settings
from stages.cli.program import app as program

sys.path.insert(0, str(Path(__file__).parent))
from commands_page import all_commands

project = "gaupipe"
version = release = __version__
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/results/*.md"]
exclude_patterns = [".*", "build", "data", "runs", "tests"]  # holds no pages

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 4  # headings have the anchors that the repository's own pages give them
smartquotes = False  # dots and quotes of code stay
nitpicky = True  # a name of ours that a docstring refers to must exist
nitpick_ignore_regex = [
    (r"py:.*", r"(?!(gaupipe|stages|store)\.).*"),
    (r"py:(class|data)", r".*"),  # signatures name classes that the reference does not describe
]
default_role = "code"
highlight_language = "none"  # where a page names none
autodoc_default_options = {"members": True, "member-order": "bysource"}
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"gaupipe {version}"
html_show_copyright = html_copy_source = html_show_sourcelink = False

PHOTOS = "photos.html"
"""A page of docs/figures/photos.py; the first page links it if the site's folder has it."""
PAGE = re.compile(r"^\* \[(.+?)\]\((.+?)\.md\)", re.MULTILINE)
NAME = re.compile(r"^\w+\.[\w.]+\w$", re.MULTILINE)


def menu(pages: str) -> str:
    """A hidden table of contents for each list of docs/README.md; the last one has this page."""
    tables = []
    for heading, pages_of in re.findall(r"^(.+):\n\n((?:\* .+\n|  .+\n)+)", pages, re.MULTILINE):
        tables.append(
            (heading, [f"{title} <{place(page)}>" for title, page in PAGE.findall(pages_of)])
        )
    tables[-1][1].append("docs/README")
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(pages_of) + "\n```\n"
        for heading, pages_of in tables
    )


def place(page: str) -> str:
    """Where a page that docs/README.md links to lies in the repository."""
    return page.removeprefix("../") if page.startswith("../") else f"docs/{page}"


def described(name: re.Match) -> str:
    """The directive that shows the docstrings of a name: a module, a class or a function."""
    whole = name[0]
    try:
        thing, directive = importlib.import_module(whole), "automodule"
    except ModuleNotFoundError:
        module, _, own = whole.rpartition(".")
        thing = getattr(importlib.import_module(module), own)
        directive = "autoclass" if inspect.isclass(thing) else "autofunction"
    heading = f"#### {whole}\n" if directive == "automodule" else ""
    return f"{heading}\n```{{eval-rst}}\n.. {directive}:: {whole}\n```\n"


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds to three pages what only the site has."""
    if page == root_doc:
        if (Path(app.outdir) / PHOTOS).exists():
            picture = re.search(r"^!\[.*\n", source[0], re.MULTILINE)
            assert picture is not None
            link = (
                f'\n<a href="{PHOTOS}">Open this page with five photos, without installing it</a>\n'
            )
            source[0] = source[0][: picture.end()] + link + source[0][picture.end() :]
        source[0] += menu((Path(app.srcdir) / "docs/README.md").read_text())
    elif page == "docs/reference":
        names = (Path(app.srcdir) / "docs/public_names.txt").read_text()
        source[0] += f"\n## All public names\n\n{NAME.sub(described, names)}"
    elif page == "docs/commands":
        source[0] += f"\n{all_settings()}\n## Options\n\n{all_commands(program)}"


def as_rst(app: Sphinx, what: str, name: str, thing: object, options, lines: list[str]) -> None:
    """Makes reStructuredText of what docstrings write plainly: tables of names, code, and |x|."""
    blocks: list[str] = []
    for block in re.split(r"\n{2,}", "\n".join(lines).strip("\n")):
        if block.startswith("    "):  # code
            blocks += ["::", block]
        elif re.match(r"\S+ {2,}\S|.+\n {4,}\S", block):
            blocks.append(definitions(block))
        else:  # bars would be substitutions, except between backticks
            parts = re.split(r"(`+.+?`+)", block, flags=re.DOTALL)
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            blocks.append("".join(parts))
    lines[:] = [*"\n\n".join(blocks).splitlines(), ""]


def definitions(table: str) -> str:
    """A list of definitions of a table: on each line a name, spaces, and text that later lines, all
    indented, may continue."""
    rows: list[list[str]] = []
    for line in table.splitlines():
        if line.startswith(" "):
            rows[-1].append(line.strip())
        else:
            rows.append(re.split(r" {2,}", line, maxsplit=1))
    return "\n".join(f"``{name}``\n    {' '.join(text)}" for name, *text in rows)


def front_page(app: Sphinx, error: Exception | None) -> None:
    """README.html is what a server shows of the folder too."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("build-finished", front_page)
