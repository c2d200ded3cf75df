"""Shape checks on every call of the library, thread counts and the two tiers."""

import os
import signal
import sys

from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401 - the hook looks it up by name

# The hook rewrites modules as they are imported: it must come first.
assert not any(name.split(".")[0] == "newtention" for name in sys.modules)
install_import_hook("newtention", "tests.typecheck.check")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--run-full", action="store_true", help="run the full case counts as well")


def pytest_configure(config):
    # A shell starts background jobs with Ctrl-C ignored, and their children would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    too_slow = [hypothesis.HealthCheck.too_slow]
    profile = {"deadline": None, "derandomize": True, "suppress_health_check": too_slow}
    hypothesis.settings.register_profile("quick", max_examples=40, **profile)
    hypothesis.settings.register_profile("full", max_examples=1000, **profile)
    hypothesis.settings.load_profile("full" if config.getoption("--run-full") else "quick")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--run-full"):
        return
    skip = pytest.mark.skip(reason="full tier: needs --run-full")
    for item in items:
        # Not `in item.keywords`: a parameter called "full" is a keyword as well.
        if item.get_closest_marker("full"):
            item.add_marker(skip)


@pytest.fixture
def full(request):
    """Whether the full case counts were asked for."""
    return request.config.getoption("--run-full")


@pytest.fixture
def unchecked():
    """Call the library as users do, without the tests' type checker before its own checks."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


LONG = ("integration", "statistical", "properties")
LONG_UNITS = ("benchmarks", "certify", "display", "docs", "memory", "metric", "paper_regime")
LONG_UNITS += ("regression", "report", "spectrum", "svm", "maps", "selection", "basin_hopping")
"""Tests that call the library thousands of times, which the checks make five times as slow."""


@pytest.fixture(autouse=True)
def checked(request):
    """Shape checks: everywhere in the full tier, but in the quick one not where calls are many."""
    module = request.node.path
    long = module.parent.name in LONG or module.stem.removeprefix("test_") in LONG_UNITS
    if long and not request.config.getoption("--run-full"):
        request.getfixturevalue("unchecked")
