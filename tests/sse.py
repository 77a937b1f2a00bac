"""Server-sent events of a streamed answer."""

from collections.abc import Iterator

import httpx


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each event.

    Lines end at line feeds alone: httpx's `iter_lines` also cuts at U+2028 and its like, which a
    model may write.
    """
    rest = ""
    for text in response.iter_text():
        *lines, rest = (rest + text).split("\n")
        yield from (line.removeprefix("data: ") for line in lines if line.startswith("data: "))


__all__ = ["events"]
