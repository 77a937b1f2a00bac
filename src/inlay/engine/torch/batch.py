"""A scheduled step as tensors: the positions of all chunks, packed one after another.

Shapes: T positions in the step, S spans, R rows among the positions, C hidden size, N page groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inlay.engine.torch.cache.kv_layout import pages_for
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.lora import BASE
from inlay.engine.torch.transfers import upload
from inlay.errors import EngineError
from inlay.prompt import Rows, Segment, Tokens

if TYPE_CHECKING:
    from inlay.engine.torch.scheduler import ScheduledChunk


@dataclass(frozen=True, slots=True)
class BatchItem:
    """Positions [start, start + count) of one sequence to compute.

    Attributes:
        segments: (first absolute position, part) over exactly these positions, in order.
        start: first position.
        count: number of positions, at least one.
        pages: the sequence's pages in each page group, covering these positions and those they see.
        samples: True if the last position's logits are needed.
        adapter: slot of the adapter for these positions, or `lora.BASE`.
        pending: True if only the device knows the last position's token; the segments end before
            it.
    """

    segments: Iterable[tuple[int, Segment]]
    start: int
    count: int
    pages: Sequence[PageRun]
    samples: bool
    adapter: int = BASE
    pending: bool = False


class Batch(NamedTuple):
    """The input of one forward pass.

    Attributes:
        token_ids: [T] int64; 0 for an embedding vector.
        row_index: [R] int64, indices of the embedding vectors in the batch.
        row_values: [R, C], in the model's dtype; [0, 0] without embedding vectors.
        positions: [T] int64, absolute in each sequence.
        slots: [N, T] int64, where keys and values are stored: page number * page size + offset.
        sampled: [number of spans that sample] int64, indices in the batch whose logits are needed.
        pending: [number of pending sequences] int64, indices in the batch whose tokens only the
            device knows; 0 in `token_ids`.
        block_table: [N, S, longest] int32, page numbers of each sequence; padded with 0, the null
            page.
        counts: positions of each span.
        contexts: number of positions of each sequence up to the end of its span.
        adapters: slot of each span's adapter, or `lora.BASE`; empty if no span has one.
    """

    token_ids: Tensor
    row_index: Tensor
    row_values: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor
    pending: Tensor
    block_table: Tensor
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    adapters: tuple[int, ...] = ()

    @classmethod
    def of(cls, spans: "Iterable[ScheduledChunk]", page_size: int) -> "Batch":
        """Build the batch of a scheduled step; raises as `pack` does."""
        return cls.pack(
            (
                BatchItem(
                    span.sequence.segments(span.start, span.start + span.count),
                    span.start,
                    span.count,
                    span.sequence.pages,
                    span.samples,
                    span.sequence.adapter,
                    span.sequence.has_pending_token,
                )
                for span in spans
            ),
            page_size,
        )

    @classmethod
    def pack(cls, stretches: Iterable[BatchItem], page_size: int) -> "Batch":
        """Pack spans of sequences, in order, on the host.

        Raises:
            EngineError: an unsupported segment, embedding vectors of different dtypes, or pages
                that do not cover a span.
        """
        stretches = list(stretches)
        total = sum(stretch.count for stretch in stretches)
        token_ids = np.zeros(total, dtype=np.int64)
        positions = np.empty(total, dtype=np.int64)
        groups = len(stretches[0].pages)
        slots = np.empty((groups, total), dtype=np.int64)
        page_counts = [pages_for(stretch.start + stretch.count, page_size) for stretch in stretches]
        table = np.zeros((groups, len(stretches), max(page_counts)), dtype=np.int32)
        rows: list[tuple[int, Rows]] = []
        first = 0
        for index, stretch in enumerate(stretches):
            stop = stretch.start + stretch.count
            for group, run in enumerate(stretch.pages):
                if run.end < page_counts[index]:
                    raise EngineError(
                        f"{run.end} pages of {page_size} positions do not hold {stop}"
                    )
                pages = run.pages[: page_counts[index] - run.first]
                table[group, index, run.first : run.first + len(pages)] = pages
            absolute = np.arange(stretch.start, stop)
            positions[first : first + stretch.count] = absolute
            slots[:, first : first + stretch.count] = (
                table[:, index, absolute // page_size].astype(np.int64) * page_size
                + absolute % page_size
            )
            for position, segment in stretch.segments:
                where = first + position - stretch.start
                if isinstance(segment, Tokens):
                    token_ids[where : where + len(segment)] = segment.ids
                elif isinstance(segment, Rows) and not segment.bundle:
                    rows.append((where, segment))
                else:
                    raise EngineError(
                        "the torch engine embeds tokens and plain rows; got media or a bundle"
                    )
            first += stretch.count
        ends = np.cumsum([stretch.count for stretch in stretches], dtype=np.int64) - 1
        sampled = ends[np.fromiter((stretch.samples for stretch in stretches), dtype=np.bool_)]
        pending = ends[np.fromiter((stretch.pending for stretch in stretches), dtype=np.bool_)]
        row_index, row_values = _rows(rows)
        adapters = tuple(stretch.adapter for stretch in stretches)
        return cls(
            torch.from_numpy(token_ids),
            row_index,
            row_values,
            torch.from_numpy(positions),
            torch.from_numpy(slots),
            torch.from_numpy(sampled),
            torch.from_numpy(pending),
            torch.from_numpy(table),
            tuple(stretch.count for stretch in stretches),
            tuple(stretch.start + stretch.count for stretch in stretches),
            adapters if any(slot != BASE for slot in adapters) else (),
        )

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to `device`.

        Copies to CUDA are from pinned memory and do not block.
        """
        if self.token_ids.device == device:
            return self
        return Batch(
            upload(self.token_ids, device),
            upload(self.row_index, device),
            upload(self.row_values, device),
            upload(self.positions, device),
            upload(self.slots, device),
            upload(self.sampled, device),
            upload(self.pending, device),
            upload(self.block_table, device),
            self.counts,
            self.contexts,
            self.adapters,
        )


def _rows(rows: list[tuple[int, Rows]]) -> tuple[Tensor, Tensor]:
    """Return the indices of embedding vectors in the batch [R] and their values [R, C].

    This is the only copy from client memory.
    """
    if not rows:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
    dtypes = {segment.dtype for _, segment in rows}
    if len(dtypes) > 1:
        raise EngineError(
            f"rows of one batch must have the model's dtype; got {', '.join(sorted(dtypes))}"
        )
    index = torch.tensor(list(chain.from_iterable(range(at, at + len(part)) for at, part in rows)))
    dtype: torch.dtype = getattr(torch, dtypes.pop())
    values = torch.empty(len(index), rows[0][1].shape[1], dtype=dtype)
    target = values.view(torch.uint8).numpy()
    first = 0
    for _, segment in rows:
        source = np.frombuffer(segment.data.view, dtype=np.uint8)
        target[first : first + len(segment)] = source.reshape(len(segment), -1)
        first += len(segment)
    return index, values
