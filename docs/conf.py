"""Configure Sphinx: pages in Markdown, an API reference from the docstrings."""

import re

project = "kda-ops"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "kernels/journal"]
html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name shapes and dtypes
myst_heading_anchors = 3

JOURNAL = "https://github.com/kda-ops/kda-ops/blob/main/docs/kernels/journal/"


def link_to_repository(app, name, source):
    """Turn links to the journal, which is not built, into links to the repository."""
    source[0] = re.sub(r"\]\((?:\w+/)*journal/", f"]({JOURNAL}", source[0])


def setup(app):
    """Register the hook above."""
    app.connect("source-read", link_to_repository)
