"""Integers with a suffix, as vLLM's command line reads them."""

import re

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def expand_suffix(text: str) -> str:
    """Write out the multiplier of an integer: `8k` is 8000, `8K` is 8192, `25.6k` is 25600.

    Lower-case k, m, g, t are powers of 1000, upper-case K, M, G, T of 1024, as in vLLM's
    `human_readable_int`.

    Args:
        text: any; what has no such suffix comes back as it is.

    Raises:
        ValueError: a decimal fraction of a power of 1024.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return text
    number, suffix = match.groups()
    if suffix.islower():
        return str(int(float(number) * 1000 ** _POWERS[suffix]))
    if "." in number:
        raise ValueError(f"{suffix} takes whole numbers, did you mean {number}{suffix.lower()}?")
    return str(int(number) * 1024 ** _POWERS[suffix.lower()])
