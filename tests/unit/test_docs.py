"""The pages: reachable, their links and code sound, nothing of the public interface left out."""

import ast
import builtins
import dataclasses
import doctest
import importlib.util
import inspect
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import plots, sketch
from tests.pages import DOCS

ROOT = DOCS.parent
PACKAGE = ROOT / "src" / "newtention"
BUILT = {"_build", "auto_gallery"}
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if not BUILT & set(p.relative_to(DOCS).parts)]
FENCE = re.compile(r"^(```+).*?^\1", re.S | re.M)

by_page = pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)


def prose(page):
    """The page without its fenced and indented blocks."""
    text = FENCE.sub("", page.read_text())
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.M)


def anchors(page):
    """Of the headings, as GitHub and MyST make them."""
    found, seen = set(), {}
    for heading in re.findall(r"^#{1,6} +(.*)$", FENCE.sub("", page.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def links(page):
    return re.findall(r"(?<!\\)\]\(\s*<?([^)\s>]+)>?[^)]*\)", prose(page))


@by_page
def test_links_lead_somewhere(page):
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "auto_gallery" in target.parts:  # the build makes it from the gallery's scripts
            assert target == DOCS / "auto_gallery" / "index.rst", link
            continue
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_checks_of_links_see_wrong_ones(tmp_path):
    (tmp_path / "README.md").write_text("# A page\n[x](#a-page) [y](#other)")
    with pytest.raises(AssertionError, match="#other"):
        test_links_lead_somewhere(tmp_path / "README.md")


def options_of_benchmarks():
    """The program's options, and the names that `--only` takes; read, since it imports rivals."""
    program = (ROOT / "benchmarks" / "__main__.py").read_text()
    table = re.search(r"^BENCHMARKS = \{\n(.*?)^\}", program, re.S | re.M)[1]
    return set(re.findall(r'"(--\w+)"', program)), set(re.findall(r'"(\w+)":', table))


@by_page
def test_commands_of_benchmarks_exist(page):
    options, names = options_of_benchmarks()
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"python -m benchmarks ([^`\n]*)", text):
        assert set(re.findall(r"--\w+", command)) <= options, command
        assert set(re.findall(r"--only (\w+)", command)) <= names, command


def test_checks_of_commands_see_wrong_ones(tmp_path):
    page = tmp_path / "page.md"
    for command in ("--only layer --out results", "--fast --only maps", "\\\n --only head"):
        page.write_text(f"`python -m benchmarks {command}`")
        with pytest.raises(AssertionError):
            test_commands_of_benchmarks_exist(page)


def toctree(page):
    """The pages that a page's toctrees name."""
    entries = []
    for body in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.S | re.M):
        entries += [line for line in body.split("\n") if line and not line.startswith(":")]
    return [page.parent / entry for entry in entries]


def test_every_page_is_in_a_toctree():
    listed, waiting = {DOCS / "index"}, [DOCS / "index.md"]
    while waiting:
        for entry in toctree(waiting.pop()):
            assert entry not in listed, f"{entry} is listed twice"
            listed.add(entry)
            page = entry.with_suffix(".md")
            if entry != DOCS / "auto_gallery" / "index":
                assert page.exists(), entry
                waiting.append(page)
    assert {p.with_suffix("") for p in PAGES} <= listed


def documented(page):
    """Objects that the reference shows on a page."""
    return re.findall(r"^\.\. (?:auto|py:)\w+:: newtention\.([\w.]+)", page.read_text(), re.M)


def test_the_reference_is_complete():
    shown = [name for page in PAGES if page.parent.name == "api" for name in documented(page)]
    own = {"newtention.plots", "newtention.path_figure"}
    drawn = {
        f"plots.{name}"
        for name, f in inspect.getmembers(plots, inspect.isfunction)
        if f.__module__ in own and not name.startswith("_")
    }
    modules = {name for name in nt.__all__ if inspect.ismodule(getattr(nt, name))}
    wanted = set(nt.__all__) - modules | {f"sketch.{n}" for n in sketch.__all__} | drawn
    assert sorted(shown) == sorted(wanted)


@pytest.mark.parametrize("name", ["start", "layers", "reading-a-report", "extending"])
def test_code_of_the_guides_runs(name, tmp_path, monkeypatch):
    """The blocks of a page one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page = DOCS / f"{name}.md"
    names = {"__name__": name}
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        exec(compile(code, str(page), "exec"), names)
    if name == "start":
        assert names["solution"].success
        assert summary_lines(page.read_text()) == summary_lines(names["solution"].summary())
    if name == "layers":
        assert round(names["solution"].validation_loss, 2) == 0.13  # as the page says
        assert names["solution"].validation_loss < names["solution"].history[0].validation
        assert torch.equal(names["again"].theta, names["solution"].layer.theta)
    if name == "extending":
        assert names["it"].ended == {0: nt.Status.CONVERGED}


def summary_lines(text):
    """Names of the lines of a summary, from its method to its iterations."""
    part = text[text.index("method newton\nLoss") : text.index("\nSeconds")]
    return [line.split("  ")[0] for line in part.splitlines()]


MODULES = sorted(
    {
        getattr(nt, name).__module__
        for name in nt.__all__
        if inspect.isfunction(getattr(nt, name)) or inspect.isclass(getattr(nt, name))
    }
)
MOST_USED = (
    "AttentionProblem", "FactoredAttention", "solve", "solve_many", "loss", "gradient", "hessian",
    "hessian_operator", "predict", "attention_weights", "truncate", "certify", "spectrum",
    "softmax_regression", "attention_svm",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    module = importlib.import_module(name)
    names = {"np": np, "nt": nt, "torch": torch}  # as the reference says
    results = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_the_most_used_have_an_example():
    for name in MOST_USED:
        assert ">>> " in inspect.getdoc(getattr(nt, name)), name


FUNCTIONS = [
    f
    for room in (nt, sketch)
    for f in (getattr(room, name) for name in room.__all__)
    if inspect.isfunction(f)
]


def sections(function):
    """Of a docstring by name, each a list of its lines without the first indentation."""
    found, lines = {}, None
    for line in inspect.getdoc(function).splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Example):", line):
            lines = found.setdefault(line[:-1], [])
        elif line and not line.startswith("    "):
            lines = None
        elif line and lines is not None:
            lines.append(line[4:])
    return found


def entries(lines):
    """What a section names, several before one colon apart."""
    heads = [re.match(r"([\w*]+(?:, [\w*]+)*): \S", line) for line in lines]
    return [name for head in heads if head for name in head[1].split(", ")]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_docstrings_name_arguments_results_and_errors(function):
    signature, found = inspect.signature(function), sections(function)
    assert entries(found["Args"]) == list(signature.parameters)
    assert ("Returns" in found) == (signature.return_annotation not in ("None", None))
    errors = entries(found["Raises"])
    assert errors
    assert all(issubclass(getattr(builtins, name), Exception) for name in errors)


def fields_of(kind):
    """Of a dataclass or a named tuple, without private ones."""
    names = kind._fields if hasattr(kind, "_fields") else [f.name for f in dataclasses.fields(kind)]
    return {name for name in names if not name.startswith("_")}


RECORDS = [
    kind
    for room in (nt, sketch)
    for kind in (getattr(room, name) for name in room.__all__)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    if kind is not nt.AttentionProblem  # its constructor takes other names
]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda c: c.__name__)
def test_docstrings_name_the_fields(kind):
    text = "\n".join(inspect.cleandoc(c.__doc__ or "") for c in kind.__mro__[:-1])
    heads = re.findall(r"(?:^ *|\.  )(\w+(?:, \w+)*): ", text, re.M)
    named = {name for head in heads for name in head.split(", ")}
    assert fields_of(kind) <= named | set(re.findall(r"`(\w+)`", text))


def test_checks_of_docstrings_see_gaps():
    def f(x: int, y: int) -> int:
        """Add.

        Args:
            x: one.

        Raises:
            ValueError: never.
        """
        return x + y

    with pytest.raises(AssertionError):
        test_docstrings_name_arguments_results_and_errors(f)

    class Pair(NamedTuple):
        """Two numbers.

        left: the first.
        """

        left: int
        right: int

    with pytest.raises(AssertionError):
        test_docstrings_name_the_fields(Pair)
    assert entries(["a, b: two", "  c: part of them", "d:", "**e: the rest"]) == ["a", "b", "**e"]


def extension(name):
    """A module of the site's build."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "extensions" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def converted(text, names=()):
    """By the site's build, as it stands in a docstring."""
    return "\n".join(extension("docstrings").converted(text.split("\n"), set(names)))


def test_pages_that_need_the_network_are_seen():
    found = extension("offline").loaded_from_elsewhere
    away = "//cdn.example.org/x"
    for text in (
        f'<script async src="https:{away}"></script>',
        f"<img alt='' src='http:{away}'>",
        f'<link rel="stylesheet" type="text/css" href="{away}">',
        f'<link href="{away}" rel="icon">',
    ):
        assert [address.split(":")[-1] for address in found(text)] == [away], text
    fine = f'<a href="https:{away}"></a><script src="_static/x.js"></script><img src="a//b.png">'
    assert found(fine + f'<link rel="canonical" href="https:{away}">') == []


def test_docstrings_become_restructuredtext():
    fields = "A step.\n\nx, y: lengths ||a||_F\n    of both.\nz: `not *touched*`.\n\nThen more."
    want = "A step.\n\n\n* **x, y**".replace("x, y", "x**, **y")
    got = converted(fields, ["x", "y", "z"])
    assert got.startswith(
        want + r": lengths \|\|a\|\|_F" + "\n  of both.\n* **z**: `not *touched*`."
    )
    assert got.endswith("\n\nThen more.")
    assert converted("F:\n\n    a * b\n\nThen.") == "F:\n\n::\n\n    a * b\n\nThen."
    arguments = "Args:\n    X: a * b.\n\nExample:\n    >>> 2 * 3\n    6 * 1"
    assert converted(arguments) == arguments.replace("a * b", r"a \* b")
    assert converted("See docs/errata.md.") == "See :doc:`/errata`."
    shared = "x: rows.  y, z: columns; 0 to\n9, as before."
    assert converted(shared, ["x", "y", "z"]) == (
        "\n* **x**: rows.\n* **y**, **z**: columns; 0 to\n  9, as before."
    )


def rooms():
    """The names in the table of rooms, row by row."""
    table = (DOCS / "architecture.md").read_text().split("## The rooms")[1].split("## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    return [re.findall(r"`([\w./]+)`", row) for row in rows]


def test_rooms_are_those_of_the_tree():
    there = {p.name + "/" * p.is_dir() for p in PACKAGE.iterdir()}
    named = [name for row in rooms() for name in row]
    assert sorted(named) == sorted(there - {"__init__.py", "py.typed", "__pycache__/"})


def test_modules_import_from_rooms_above():
    place = {}
    for i, row in enumerate(rooms()):
        place |= {name.removesuffix(".py").removesuffix("/"): i for name in row}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("newtention."):
                other = node.module.split(".")[1]
                assert place[other] <= place[room], f"{path}: {node.module}"
