"""The run-time type checker of the tests: beartype, with int accepted for float (PEP 484)."""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    """Decorate, but for methods that name `Self`: the hook decorates them outside their class."""
    try:
        return _beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
