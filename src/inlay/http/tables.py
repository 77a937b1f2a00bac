"""Embedding tables of the models, and tokens near to rows, for `--enable-embedding-lookup`."""

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from inlay.base.errors import EngineError, InlayError
from inlay.base.pace import mark_background
from inlay.messages.card import ModelCard
from inlay.tensors.hub import local_directory
from inlay.tensors.table import EmbeddingTable, spread

_log = logging.getLogger(__name__)

_SAMPLED_ROWS = 512

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Table:
    """A model's embedding table, memory-mapped.

    Attributes:
        rows: of tokens.
        median_norm: of up to 512 rows spread over the table.
    """

    rows: EmbeddingTable
    median_norm: float


class Tables:
    """Embedding tables by model directory, each opened once.

    What reads them runs in one thread, so that searches of a whole table wait for each other and
    leave the other cores to requests.

    Args:
        served: the directories whose tables are kept when another is opened.
    """

    def __init__(self, served: Callable[[], Collection[str]]) -> None:
        self._served = served
        self._opened: dict[str, Table] = {}
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="inlay-tables", initializer=mark_background
        )

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` in the thread; what has not begun when its caller leaves never does."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def of(self, card: ModelCard) -> Table:
        """Return the table of the model of `card`.

        Raises `EngineError` if its directory here has not the table that the worker has; the log
        says why.
        """
        found = self._opened.get(card.path)
        if found is None:
            found = self._opened[card.path] = await self.run(_open, card)
            for path in self._opened.keys() - {card.path, *self._served()}:
                del self._opened[path]
        return found

    def close(self) -> None:
        """End the thread after its current task."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _open(card: ModelCard) -> Table:
    try:
        table = EmbeddingTable.open(local_directory(card.path) or card.path)
    except InlayError as error:
        # A fault of the server: the client is not shown the paths of its files.
        _log.error("cannot read an embedding table: %s", error.message)
        raise EngineError("this server cannot read the model's embedding table") from error
    if card.embedding_table_id and table.id != card.embedding_table_id:
        _log.error("%s has table %s, its worker %s", card.path, table.id, card.embedding_table_id)
        raise EngineError("this server's copy of the model is not the worker's")
    sampled = table.rows(spread(table.shape[0], _SAMPLED_ROWS)).astype(np.float64)
    return Table(table, float(np.median(np.linalg.norm(sampled, axis=1))))


def with_noise(rows: npt.NDArray[Any], level: float, seed: int) -> npt.NDArray[Any]:
    """Return rows with Gaussian noise, in their dtype.

    Args:
        rows: [n, hidden].
        level: length of the noise of a row, as a share of the median length of `rows`.
        seed: equal seeds give equal noise.
    """
    wide = rows.astype(np.float32)
    deviation = level * float(np.median(np.linalg.norm(wide, axis=1))) / rows.shape[1] ** 0.5
    noise = np.random.default_rng(seed).standard_normal(wide.shape, dtype=np.float32)
    return (wide + np.float32(deviation) * noise).astype(rows.dtype)
