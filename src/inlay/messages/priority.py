"""Priorities of requests beside those of clients, which are from -2**31 to 2**31 - 1.

Lower is sooner. A request of the background class gives way to every other: it waits in the router
while others do, and in an engine it yields its place, its pages and most steps.
"""

from typing import Final

FIRST: Final = -(2**31) - 1
"""Priority of a probe, before every client's."""

BACKGROUND: Final = 2**31
"""Priority of the background class, after every client's."""
