"""Files that must be refused: each with its message, none with memory beyond what was sent."""

import tracemalloc
import warnings

import pytest

from inlay.base.errors import EmbeddingsError
from inlay.tensors import ReadLimits, read
from tests.tensors.hostile import NOT_A_TENSOR, hostile_files

FILES = hostile_files()
MARGIN = 1 << 20


def _made(title: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return FILES[title][0]()


@pytest.mark.parametrize("title", FILES)
def test_is_refused_by_name_with_no_more_memory_than_was_sent(title: str) -> None:
    data = _made(title)
    limits = ReadLimits(max_bytes=1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(EmbeddingsError) as refusal:
            read(data, limits=limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert NOT_A_TENSOR in refusal.value.message
    assert FILES[title][1] in refusal.value.message
    assert len(refusal.value.message) < 1000
    assert refusal.value.status == 400
    assert refusal.value.param == "prompt_embeds"
    assert peak < len(data) + MARGIN


@pytest.mark.parametrize("size", [0, 1, 99])
def test_under_a_hundred_bytes_is_refused(size: int) -> None:
    with pytest.raises(EmbeddingsError, match="decoded data must be at least 100 bytes"):
        read(bytes(size))


@pytest.mark.parametrize(
    ("limit", "size"),
    [
        (10 * 1024 * 1024, "10MB"),
        (64 * 1024 * 1024, "64MB"),
        (256 * 1024, "256KB"),
        (1536 * 1024, "1536KB"),
        (1000, "1000 bytes"),
    ],
)
def test_over_the_limit_is_refused_before_it_is_looked_at(limit: int, size: str) -> None:
    with pytest.raises(
        EmbeddingsError, match=f"exceeds maximum size of {size}: got {limit + 1} bytes"
    ):
        read(memoryview(bytes(limit + 1)), limits=ReadLimits(max_bytes=limit))


def test_ten_megabytes_are_the_limit_unless_told_otherwise() -> None:
    with pytest.raises(EmbeddingsError, match="exceeds maximum size of 10MB"):
        read(bytes(10 * 1024 * 1024 + 1))
    with pytest.raises(EmbeddingsError, match="no known format"):
        read(bytes(10 * 1024 * 1024))
