"""Common parts of the tests of the store: a clock, tensors, uploads."""

import numpy as np

from inlay.messages.prompt import Buffer
from inlay.store import StoredPrompt, Target
from inlay.store.store import PromptStore
from inlay.tensors import ReadLimits, Tensor, read, write

HIDDEN = 8
TTL = 100.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def upload_of(
    seed: int,
    *,
    rows: int = 16,
    hidden: int = HIDDEN,
    dtype: str = "float32",
    table_id: str | None = None,
) -> tuple[Buffer, Tensor]:
    """The container bytes and the tensor of a prompt that no other seed has."""
    array = np.random.default_rng(seed).standard_normal((rows, hidden)).astype(dtype)
    data = write(array, "safetensors", table_id=table_id)
    return Buffer(data), read(data, limits=ReadLimits(max_bytes=1 << 30))


def plain(seed: int, rows: int = 16) -> bytes:
    """The elements of that prompt."""
    return bytes(upload_of(seed, rows=rows)[1].data.view)


def put(store: PromptStore, tenant: str, seed: int, *, rows: int = 16) -> StoredPrompt:
    return store.put(tenant, *upload_of(seed, rows=rows))


def target(
    dtype: str = "float32",
    *,
    hidden: int = HIDDEN,
    max_abs: float | None = None,
    table_id: str | None = None,
) -> Target:
    return Target(hidden_size=hidden, dtype=dtype, max_abs=max_abs, table_id=table_id)


def elements(store: PromptStore, tenant: str, id_: str) -> bytes:
    """Rows of the store as float32, joined."""
    return b"".join(bytes(rows.data.view) for rows in store.rows(tenant, id_, target()))
