"""The configuration of Sphinx for ``make docs``. The site needs no network."""

import pipeworker

project = "pipeworker"
version = release = pipeworker.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
highlight_language = "none"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
html_theme = "furo"
html_title = "pipeworker"
html_show_copyright = html_show_sphinx = html_copy_source = False
