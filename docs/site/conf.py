"""What ``make docs`` builds the site with.

Sphinx's source directory is the repository's root, so that a relative link leads to the same file
in the site as on GitHub; figures and programs that pages link to are copied into the site.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

HERE = Path(__file__).parent

project = "dpex"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/reference/*.rst", "benchmarks/*.md", "*/README.md"]
# Not looked into; include_patterns alone would have all of an environment's directories walked.
exclude_patterns = [".*", "build", "dist"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
highlight_language = "text"
# Dashes only: quotation marks are as on GitHub.
smartquotes_action = "D"

autodoc_default_options = {"members": True, "member-order": "bysource"}
maximum_signature_line_length = 90
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True

html_theme = "furo"
html_title = "dpex"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False

# What a browser fetches by itself, where that is from another host.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc="(?:https?:)?//[^"]*"""
    r"""|<link\b[^>]*\bhref="(?:https?:)?//[^"]*"""
)


def _add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the table of contents, which is of no use on GitHub, behind the README."""
    if docname == app.config.root_doc:
        source[0] += (HERE / "navigation.md").read_text()


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Name the first page as browsers expect it, and see that pages need no other host."""
    if error is not None:
        return
    shutil.copyfile(app.outdir / f"{app.config.root_doc}.html", app.outdir / "index.html")
    for page in app.outdir.rglob("*.html"):
        if fetched := _FETCHED.search(page.read_text()):
            raise ExtensionError(f"{page} is not complete by itself: {fetched.group()}")


def setup(app: Sphinx) -> None:
    """Connect what is done beside Sphinx's own work."""
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _finish)
