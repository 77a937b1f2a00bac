"""Random changes to bytes, with words and numbers that mean something.

Where a fuzzer's own changes know too little.
"""

import random
from collections.abc import Sequence

_NUMBERS = (
    0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1,
)  # fmt: skip
_STEPS = (-1, 1, 2, -2, 16, -16)


def mutated(
    data: bytes, others: Sequence[bytes], words: Sequence[bytes], rng: random.Random
) -> bytes:
    """`data` with one to eight random changes.

    Args:
        data: what to begin with.
        others: where pieces are taken from.
        words: of the format.
        rng: the only source of chance.
    """

    def below(limit: int) -> int:
        # `randrange` takes three times as long, and this is called tens of times for each
        # execution.
        return int(rng.random() * limit)

    changed = bytearray(data)
    for _ in range(1 << below(4)):
        at = below(len(changed) + 1)
        match below(8):
            case 0 if at < len(changed):
                changed[at] ^= 1 << below(8)
            case 1 if at < len(changed):
                changed[at] = below(256)
            case 2:
                size = 1 << below(4)
                value = (_NUMBERS[below(len(_NUMBERS))] + below(5) - 2) % (1 << 8 * size)
                changed[at : at + size] = value.to_bytes(size, "big" if below(2) else "little")
            case 3:
                word = words[below(len(words))]
                changed[at : at + len(word) * below(2)] = word
            case 4:
                del changed[at : at + 1 + below(64)]
            case 5:
                piece = changed[at : at + 1 + below(128)]
                to = below(len(changed) + 1)
                changed[to:to] = piece
            case 6:
                other = others[below(len(others))]
                start = below(len(other))
                size = 1 + below(256)
                changed[at : at + size * below(2)] = other[start : start + size]
            case _ if at < len(changed):
                changed[at] = (changed[at] + _STEPS[below(len(_STEPS))]) % 256
    return bytes(changed)
