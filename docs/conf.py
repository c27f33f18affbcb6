"""Configure Sphinx: pages in Markdown, an API reference from the docstrings."""

project = "kda-ops"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name shapes and dtypes
myst_heading_anchors = 3
