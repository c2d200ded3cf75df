"""The page on the paper's method: its example prints what it shows, its figures and links hold."""

import pytest

from newtention import Status
from newtention.newton import regime
from newtention.newton.token_metric import DELTA, EPSILON
from tests.pages import DOCS, block, run_example
from tests.unit.test_certificates_doc import broken_links, mismatches

PAGE = DOCS / "paper-method.md"


@pytest.fixture(scope="module")
def page():
    """The names that the page's example defines, and what it printed."""
    return run_example(PAGE)


def test_page_prints_what_it_shows(page):
    printed, shown = (text.splitlines() for text in (page[1], block(PAGE, "text")))
    assert mismatches("\n".join(printed), "\n".join(shown)) == []
    wrong = "\n".join(shown).replace("0.3338", "0.4338", 1)
    assert mismatches("\n".join(printed), wrong)


def test_what_the_page_says_of_its_example(page):
    assert page[0]["solution"].success
    table = page[0]["nt"].contraction(page[0]["problem"], page[0]["points"], page[0]["solution"])
    assert table.holds
    assert all(step.euclidean_bound > 1 for step in table.steps)  # silent, as the page says


def test_constants_of_the_page():
    text = PAGE.read_text()
    assert f"Up to {regime.FEW_UNKNOWNS} unknowns (`FEW_UNKNOWNS`)" in text
    assert regime.LIMIT == 0.5
    assert f"{EPSILON} but with probability {DELTA}" in " ".join(text.split())
    assert Status.LEFT_REGIME.name in text


def test_links_lead_somewhere():
    assert broken_links(PAGE, PAGE.read_text()) == []
