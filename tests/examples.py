"""Numbers of examples of property tests, by the profile they run under."""

from hypothesis import settings

FULL, QUICK = 60, 12
"""Examples of a test that names no number: in CI, and in `make test`."""


def examples(number: int) -> int:
    """Return `number` in CI, and the same share of it as of others in `make test`."""
    return max(5, number * settings().max_examples // FULL)
