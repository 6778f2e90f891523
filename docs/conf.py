"""How Sphinx builds these pages: ``make docs``, then open ``docs/_build/html/index.html``."""

from __future__ import annotations

import composer_ds

project = 'composer_ds'
author = 'The composer_ds authors'
release = composer_ds.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
exclude_patterns = ['_build']
myst_enable_extensions = ['colon_fence']
# Links to headings, as GitHub makes them: settings.md#precision
myst_heading_anchors = 4

html_theme = 'furo'
html_title = 'composer_ds'

autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # the docstrings have the types
napoleon_google_docstring = True
napoleon_numpy_docstring = False
