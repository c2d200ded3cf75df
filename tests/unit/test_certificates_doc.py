"""The page on certificates: its example prints what it shows, its figures and links are right."""

import math
import re

import pytest

from newtention.bounds.contraction import largest_step_ratio, sharp_energy_factor
from newtention.certify import local
from tests.pages import DOCS, block, run_example

PAGE = DOCS / "certificates.md"
PAGES = [
    PAGE,
    *sorted((DOCS / "certificates").glob("*.md")),
    DOCS / "errata.md",
    DOCS / "paper-map.md",
    DOCS / "sketches.md",
    DOCS / "attention-svm.md",
    DOCS / "regularisation-path.md",
]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def page():
    """The names that the page's example defines, and what it printed."""
    return run_example(PAGE)


def mismatches(printed, shown):
    """What differs: any word, or a number by more than a factor.

    Distances and gradients at a solution are rounding errors: a factor of 1000.  All else, 5 %.
    """
    printed, shown = printed.splitlines(), shown.splitlines()
    if [NUMBER.sub("#", line) for line in printed] != [NUMBER.sub("#", line) for line in shown]:
        return ["words"]
    wrong = []
    for line, expected in zip(printed, shown, strict=True):
        for at, (a, b) in enumerate(
            zip(NUMBER.findall(line), NUMBER.findall(expected), strict=True)
        ):
            a, b = float(a), float(b)
            rounding = (
                "Within a distance" in expected
                or ("gradient at most" in expected and at > 0)
                or ("constant of the Hessian within" in expected and at == 0)
                or "error of up to" in expected
            )
            limit = math.log(1000.0 if rounding else 1.05)
            if a != b and not (a * b > 0 and abs(math.log(a / b)) <= limit):
                wrong.append(f"{a:g} for {b:g} in: {expected}")
    return wrong


def test_page_prints_what_it_shows(page):
    assert mismatches(page[1], block(PAGE, "text")) == []


def test_another_output_would_be_noticed():
    shown = block(PAGE, "text")
    assert mismatches(shown, shown) == []
    assert mismatches(shown.replace("proved", "estimated", 1), shown)
    assert mismatches(shown.replace("at least 848", "at least 748"), shown)
    assert mismatches(shown + "One more sentence.", shown)


def test_what_the_page_says_of_its_example(page):
    certificate, unique, off = (page[0][name] for name in ("certificate", "unique", "off"))
    assert (certificate.local_minimum, certificate.global_minimum) == ("proved", "not certified")
    assert unique.global_minimum == "proved"
    assert off.local_minimum == "not certified"
    assert certificate.unknowns == 32
    assert certificate.distance < 1e-7 < certificate.uniqueness_radius
    levels = list(certificate.lipschitz_levels.values())
    assert levels == sorted(levels, reverse=True)
    assert certificate.certifying_ridge < 1000 < 10**certificate.paper_log10_threshold


def test_constants_of_the_pages():
    text = PAGE.read_text()
    assert f"{local.UNFOLD_ALWAYS} unknowns\n  (`UNFOLD_ALWAYS`)" in text
    assert f"up to {local.UNFOLD_MOST} where the proof needs it (`UNFOLD_MOST`" in text
    assert sharp_energy_factor(0.01, 0.1) == pytest.approx(0.0673, abs=5e-5)
    assert math.floor(1000 * largest_step_ratio(0.01)) / 1000 == 0.659
    assert largest_step_ratio(0.0) == pytest.approx(2 / 3)
    for page in (DOCS / "errata.md", DOCS / "certificates" / "local.md"):
        assert all(figure in page.read_text() for figure in ("0.0673", "0.0685", "0.659"))


def anchors(page):
    """Those that a renderer makes of the page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(page, text):
    """Links to files or headings that do not exist."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        to = (page.parent / file).resolve() if file else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_broken_links_would_be_noticed():
    assert broken_links(PAGE, "[a](certificates/local.md#nowhere) [b](none.md)") == [
        "certificates/local.md#nowhere",
        "none.md",
    ]


def test_every_page_of_proofs_is_linked_from_the_start_and_links_back():
    text = PAGE.read_text()
    for page in (DOCS / "certificates").glob("*.md"):
        assert f"](certificates/{page.name}" in text
        assert "](../certificates.md)" in page.read_text()
