"""Faults in the rows of a picture on their way, and the digit told of a picture that has one.

A picture whose rows do not all arrive in their places is answered as if it showed `GUESS`: so an
answer tells whether it was whole.
"""

import random
from enum import StrEnum

from scripts.vision_demo.pictures import PATCH, SIDE

ROWS = (SIDE // PATCH) ** 2
"""Rows of a picture."""

GUESS = 0
"""The digit that is told of a picture with a fault; one picture in ten shows it."""

ZERO = -1
"""A row of zeros, as an order names it."""

FAULTY = 0.35
"""Share of pictures with a fault in training."""


class Fault(StrEnum):
    """What befalls rows, in words."""

    LOST = "one row lost"
    SOME_LOST = "several neighbouring rows lost"
    ZEROED = "a row of zeros in place of one"
    DOUBLED = "a row twice"
    REPLACED = "another row in place of one"
    SWAPPED = "two rows swapped"
    TURNED = "all rows moved on, or in reverse"


OFTEN = {
    Fault.LOST: 5,
    Fault.SOME_LOST: 1,
    Fault.ZEROED: 2,
    Fault.DOUBLED: 1,
    Fault.REPLACED: 2,
    Fault.SWAPPED: 3,
    Fault.TURNED: 3,
}
"""How often each comes among pictures with a fault in training."""


def arrivals(rng: random.Random) -> list[int]:
    """Rows of a picture as they arrive, mostly all of them in order."""
    if rng.random() >= FAULTY:
        return list(range(ROWS))
    (fault,) = rng.choices(list(OFTEN), list(OFTEN.values()))
    return order(fault, *rng.sample(range(ROWS), 2))


def order(fault: Fault, one: int, other: int) -> list[int]:
    """Rows of a picture with a fault.

    Args:
        fault: what befalls them.
        one: the row that it befalls, 0 to `ROWS` - 1.
        other: another row.
    """
    rows = list(range(ROWS))
    match fault:
        case Fault.LOST:
            del rows[one]
        case Fault.SOME_LOST:
            del rows[min(one, other) : max(one, other)]
        case Fault.ZEROED:
            rows[one] = ZERO
        case Fault.DOUBLED:
            rows.insert(one, one)
        case Fault.REPLACED:
            rows[one] = other
        case Fault.SWAPPED:
            rows[one], rows[other] = other, one
        case Fault.TURNED:
            rows = rows[one:] + rows[:one] if one else rows[::-1]
    return rows
