"""How the site is built: `make docs`."""

import sys
from pathlib import Path

import newtention

sys.path.insert(0, str(Path(__file__).parent))

project = "Newtention"
author = "The Newtention authors"
copyright = author
release = version = newtention.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax beside the pages: formulas need no network
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "extensions.command_line",
    "extensions.docstrings",
    "extensions.offline",
    "extensions.signatures",
]
exclude_patterns = ["_build", "extensions", "gallery", "auto_gallery/*.ipynb", "auto_gallery/*.py"]
# Single backticks in docstrings name Python objects; what is none is set as code.
default_role = "py:obj"
highlight_language = "none"
smartquotes = False  # they would spoil --options
maximum_signature_line_length = 80

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"  # docstrings give shapes and meaning
# Named in signatures, explained on the first page of the reference.
autodoc_type_aliases = {name: name for name in ("Array", "ArrayLike", "Point", "Start", "Callback")}
python_use_unqualified_type_names = True
python_display_short_literal_types = True
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"plot_",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("extensions.figures.keep_figures",),
    "ignore_repr_types": r"matplotlib|newtention\.drawing",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
}

html_theme = "furo"
html_title = "Newtention"
html_static_path = ["static"]
html_css_files = ["site.css"]
mathjax3_config = {"chtml": {"matchFontHeight": False, "scale": 1.07}}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
