"""Gallery images from `newtention.plots`, whose figures pyplot does not know."""

from pathlib import Path
from typing import Any
from weakref import WeakSet

from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

_shown: WeakSet[Figure] = WeakSet()


def keep_figures(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save every Figure that a cell was the first to bind to a name."""
    found = [v for v in block_vars["example_globals"].values() if isinstance(v, Figure)]
    paths = []
    for figure in found:
        if figure in _shown:
            continue
        _shown.add(figure)
        path = Path(next(block_vars["image_path_iterator"]))
        figure.savefig(path, dpi=150, metadata={"Software": None})
        paths.append(str(path))
    return figure_rst(paths, gallery_conf["src_dir"])
