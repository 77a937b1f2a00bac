"""A matrix holds each vector in the row of its line, however the lines ended."""

import asyncio
from io import BytesIO
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from inlay.store.kept.contents import Contents
from inlay.store.kept.memory import MemoryStorage
from inlay_batches import matrix as module
from inlay_batches.lines import Outcome
from inlay_batches.matrix import piece_of, write_matrix


@pytest.mark.parametrize("form", ["npy", "safetensors"])
@given(
    order=st.permutations(range(40)),
    lost=st.sets(st.integers(0, 39), max_size=9),
    width=st.integers(1, 5),
    each=st.integers(1, 9),
)
def test_rows_stand_in_the_order_of_the_lines(
    form: Any, order: list[int], lost: set[int], width: int, each: int
) -> None:
    vectors = np.arange(40 * width, dtype=np.float32).reshape(40, width)
    done = [
        Outcome(number, b"", 200, vector=vectors[number].tobytes())
        for number in order
        if number not in lost
    ]

    async def act() -> bytes:
        contents = Contents(MemoryStorage(1 << 24))
        pieces = [
            await contents.write(f"p{start}", piece_of(done[start : start + each]))
            for start in range(0, len(done), each)
        ]
        written = await write_matrix(contents, pieces, 40, width, form)
        return b"".join([await contents.read(piece) for piece in written])

    with patch.object(module, "PIECE_BYTES", 64):
        data = asyncio.run(act())
    found = np.load(BytesIO(data)) if form == "npy" else load(data)["embeddings"]
    vectors[sorted(lost)] = np.nan
    np.testing.assert_array_equal(found, vectors)
