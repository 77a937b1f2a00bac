"""Lines of a file: found wherever it is cut, and read without parsing what nobody has counted."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.http.bodies import base64_extractor
from inlay.store.kept.contents import PIECE_BYTES, Contents
from inlay.store.kept.memory import MemoryStorage
from inlay_batches.lines import Line, LineError, blocks_of, read_line
from inlay_batches.records import Place

T = TypeVar("T")


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "more"])
def test_what_stands_in_a_line_is_not_parsed_before_it_is_counted(name: str) -> None:
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}
    data = json.dumps({**fields, name: [[]] * 1_000_000}).encode()
    tracemalloc.start()
    with suppress(LineError):
        read_line(Line(0, 0, len(data), data), "/v1/embeddings", len(data))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"custom_id":"\xff"}', "it has text that is not UTF-8"),
        (b'{"custom_id":"%s","method":1,"url":1,"body":{}}' % (b"x" * 7000), "got '\"xxxx"),
    ],
)
def test_a_bad_line_is_told_in_plain_words(data: bytes, words: str) -> None:
    with pytest.raises(LineError, match=words):
        read_line(Line(0, 0, len(data), data), "/v1/embeddings", len(data))


async def test_others_run_while_a_large_file_is_kept() -> None:
    contents, turns = Contents(MemoryStorage(1 << 30)), 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await contents.write_file("a", BytesIO(bytes(8 * PIECE_BYTES)))
    counting.cancel()
    assert turns >= 7


async def test_others_run_while_a_long_line_is_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contents, turns = Contents(MemoryStorage(1 << 30)), 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    async def prepare(size: int, work: Callable[[], T], /) -> T:
        return work()

    monkeypatch.setattr(base64_extractor, "yield_gil", turn)
    text = b"a" * (8 * PIECE_BYTES + 5)
    pieces = await contents.write_file("a", BytesIO(b" " * 9 + text + b"\r\n" + text))
    blocks = blocks_of(contents, pieces, Place(), len(text) + 99, prepare)
    found = [each.data async for block in blocks for each in block]
    assert found == [text, text]
    assert turns >= 2 * len(text) // base64_extractor.STEP


@given(
    texts=st.lists(st.sampled_from([b"", b" ", b"a", b"bb", b"c" * 40, b"\r"]), max_size=12),
    cuts=st.lists(st.integers(1, 20), max_size=10),
    last=st.booleans(),
    start=st.integers(0, 11),
)
def test_lines_are_the_same_however_a_file_is_cut_and_wherever_reading_begins(
    texts: list[bytes], cuts: list[int], last: bool, start: int
) -> None:
    data = b"\n".join(texts) + (b"\n" if last and texts else b"")

    async def act() -> None:
        contents = Contents(MemoryStorage(1 << 20))
        pieces, at = [], 0
        for size in [*cuts, max(1, len(data))]:
            if at < len(data):
                pieces.append(await contents.write(f"p{at}", data[at : at + size]))
                at += size
        expected, offset = [], 0
        for number, text in enumerate(texts):
            after = offset + len(text) + 1
            long = len(text) > 30
            if text.strip() or long:
                expected.append(Line(number, offset, after, None if long else text.strip(b" \t\r")))
            offset = after
        begin = Place()
        if start < len(expected):
            begin = Place(expected[start].number, expected[start].offset)
        cut: list[int] = []

        async def prepare(size: int, work: Callable[[], T], /) -> T:
            cut.append(size)
            return work()

        blocks = blocks_of(contents, pieces, begin, 30, prepare)
        found = [block async for block in blocks]
        lines = [each for block in found for each in block]
        assert lines == [each for each in expected if each.offset >= begin.offset]
        assert sum(cut) >= max(0, len(data) - begin.offset)
        # A line whose last bytes are few is no small work.
        sizes = [sum(len(each.data or b"") for each in block) for block in found]
        assert all(size <= most for size, most in zip(sizes, cut, strict=True))

    asyncio.run(act())
