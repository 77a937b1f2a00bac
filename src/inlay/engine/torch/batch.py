"""A scheduled step as tensors: the positions of all chunks, packed one after another.

Shapes: T positions in the step, S chunks, R rows among the positions, C hidden size, N page groups.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.base.errors import EngineError
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.lora import BASE
from inlay.engine.torch.transfers import upload
from inlay.engine.torch.windows import Window
from inlay.media.positions import GRID_FIELD
from inlay.messages.prompt import Buffer, Rows, Segment, Tokens

if TYPE_CHECKING:
    from inlay.engine.torch.plan import ScheduledChunk

DEEPSTACK = "deepstack"
"""Kind of the fields of a bundle that hold inner features: `deepstack.0` and so on."""


class Workspace:
    """Reused buffers for gathered keys and values; they only grow.

    Allocating fresh memory would cost more than the attention itself.
    """

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a tensor of `shape`, dtype and device as `like`.

        Its content is undefined; it is valid until `name` is taken again.
        """
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.numel() < size
            or (buffer.dtype, buffer.device) != (like.dtype, like.device)
        ):
            buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)


@dataclass(slots=True)
class BatchItem:
    """Positions [start, start + count) of one sequence to compute.

    Attributes:
        segments: (first absolute position, part) over these positions but the last `ids`, in order.
        start: first position.
        count: number of positions, at least one.
        pages: the sequence's pages in each page group, covering these positions and those they see.
        sampled: number of positions at the end whose logits are needed.
        adapter: slot of the adapter for these positions, or `lora.BASE`.
        pending: True if only the device knows the last position's token; `segments` and `ids` end
            before it.
        rope: [3, count] int64, rotary positions; None where they are the positions themselves.
        atomic_spans: (first, past-last) absolute positions of runs whose positions see all of their
        run.
        decoding: the positions come after the prompt, and after all that is computed again.
        uncertain: number of positions at the end that may be computed again.
        ids: token ids of the positions after `segments`.
    """

    segments: Iterable[tuple[int, Segment]]
    start: int
    count: int
    pages: Sequence[PageRun]
    sampled: int
    adapter: int = BASE
    pending: bool = False
    rope: npt.NDArray[np.int64] | None = None
    atomic_spans: Sequence[tuple[int, int]] = ()
    decoding: bool = False
    uncertain: int = 0
    ids: Sequence[int] = ()


class Batch(NamedTuple):
    """The input of one forward pass.

    Attributes:
        token_ids: [T] int64; 0 for an embedding vector.
        row_index: [R] int64, indices of the embedding vectors in the batch.
        row_values: [R, C], in the model's dtype; [0, 0] without embedding vectors.
        positions: [T] int64, absolute in each sequence.
        slots: [N, T] int64, where keys and values are stored: page number * page size + offset.
        sampled: [positions whose logits are needed] int64, indices in the batch.
        pending: [number of pending sequences] int64, indices in the batch whose tokens only the
            device knows; 0 in `token_ids`.
        block_table: [N, S, longest] int32, page numbers of each sequence; padded with 0, the null
            page.
        counts: positions of each chunk.
        contexts: number of positions of each sequence up to the end of its chunk.
        adapters: slot of each chunk's adapter, or `lora.BASE`; empty if no chunk has one.
        rope: [3, T] int64, rotary positions by time, height and width; None for models that number
            positions by one axis.
        features: [K, R, C], added to the hidden states of embedding vectors after the first K
            layers; None if there are none.
        atomic_spans: (chunk, first, past-last absolute position) of runs whose positions see all of
            their run; each lies in its chunk.
        bidirectional_layers: layers in which they do, as in `Family.bidirectional`.
        decoding: chunks that decode, with the drafts they verify; the others are chunks of prompts.
        uncertain: of each chunk, positions at its end that may be computed again: what recurrent
            layers make of them is kept once it is known which count.
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
    rope: Tensor | None = None
    features: Tensor | None = None
    atomic_spans: tuple[tuple[int, int, int], ...] = ()
    bidirectional_layers: str = "all"
    decoding: frozenset[int] = frozenset()
    uncertain: tuple[int, ...] = ()

    def rotary_positions(self, axes: int) -> Tensor:
        """Return the rotary positions as a model's body takes them: [1, T], or [axes, 1, T]."""
        if self.rope is None:
            return self.positions[None]
        return self.rope if axes == 1 else self.rope[:, None]

    def wholes_of(self, window: Window) -> tuple[tuple[int, int, int], ...]:
        """Return `wholes` as a layer with this window, or none, has them."""
        return (
            () if window is None and self.bidirectional_layers == "sliding" else self.atomic_spans
        )

    def only(self, chunks: Sequence[int]) -> tuple[Tensor, "Batch"]:
        """Return the batch of some chunks, as attention reads it, and their positions in this one.

        Without tokens, embedding vectors and runs that see themselves.
        """
        ends = list(accumulate(self.counts))
        rows = [
            row for chunk in chunks for row in range(ends[chunk] - self.counts[chunk], ends[chunk])
        ]
        index = upload(torch.tensor(rows), self.slots.device)
        members = upload(torch.tensor(chunks), self.slots.device)
        part = self._replace(
            slots=self.slots.index_select(1, index),
            block_table=self.block_table.index_select(1, members),
            counts=tuple(self.counts[chunk] for chunk in chunks),
            contexts=tuple(self.contexts[chunk] for chunk in chunks),
            adapters=tuple(self.adapters[chunk] for chunk in chunks) if self.adapters else (),
            atomic_spans=(),
            decoding=frozenset(at for at, chunk in enumerate(chunks) if chunk in self.decoding),
            uncertain=tuple(self.uncertain[chunk] for chunk in chunks),
        )
        return index, part

    @classmethod
    def of(
        cls, chunks: "Iterable[ScheduledChunk]", page_size: int, *, bidirectional: str = "none"
    ) -> "Batch":
        """Build the batch of a scheduled step; raises as `pack` does.

        Args:
            chunks: of the step.
            page_size: positions in a page.
            bidirectional: layers whose attention inside atomic segments is, as in `Family`.
        """
        items = []
        for chunk in chunks:
            sequence, start, stop = chunk.sequence, chunk.start, chunk.start + chunk.count
            first = start - sequence.prompt_length
            parts: Iterable[tuple[int, Segment]] = ()
            wholes: Sequence[tuple[int, int]] = ()
            if first < 0:
                parts = sequence.prompt_segments(start, stop)
                if bidirectional != "none":
                    wholes = sequence.atomic_spans(start, stop)
            known = sequence.output[max(0, first) : max(0, first + chunk.count)]
            items.append(
                BatchItem(
                    parts,
                    start,
                    chunk.count,
                    sequence.pages,
                    chunk.num_sampled,
                    sequence.adapter,
                    sequence.has_pending_token,
                    sequence.rope(start, stop),
                    wholes,
                    chunk.decodes,
                    chunk.num_uncertain,
                    [*known, *chunk.drafts] if chunk.drafts else known,
                )
            )
        return cls.pack(items, page_size)._replace(bidirectional_layers=bidirectional)

    @classmethod
    def pack(cls, items: Sequence[BatchItem], page_size: int) -> "Batch":
        """Pack positions of sequences, in order, on the host.

        Raises:
            EngineError: an unsupported segment, embedding vectors of different dtypes, or pages
                that do not cover a chunk.
        """
        counts = [item.count for item in items]
        stops = [item.start + item.count for item in items]
        count_S = np.array(counts, dtype=np.int64)
        end_S = count_S.cumsum()
        first_S = end_S - count_S
        # Of each position: its sequence, and its place there.
        span_T = np.arange(len(items)).repeat(count_S)
        positions = np.arange(len(span_T)) + (np.array(stops, dtype=np.int64) - end_S)[span_T]
        table = _block_table(items, stops, page_size)
        index, offset = np.divmod(positions, page_size)
        slots = table[:, span_T, index].astype(np.int64) * page_size + offset
        token_ids = np.zeros(len(span_T), dtype=np.int64)
        rows: list[tuple[int, Rows]] = []
        for item, first, end in zip(items, first_S.tolist(), end_S.tolist(), strict=True):
            if item.ids:
                known = end - item.pending
                token_ids[known - len(item.ids) : known] = item.ids
            for position, segment in item.segments:
                where = first + position - item.start
                if isinstance(segment, Tokens):
                    token_ids[where : where + len(segment)] = segment.ids
                elif isinstance(segment, Rows):
                    rows.append((where, segment))
                else:
                    raise EngineError("the torch engine embeds tokens and rows; got media")
        last_S = end_S - 1
        wanted = [item.sampled for item in items]
        sampled = last_S if wanted == _ONE * len(wanted) else _last_of_each(last_S, wanted)
        row_index, row_values = _rows(rows)
        ropes = [item.rope for item in items if item.rope is not None]
        adapters = tuple([item.adapter for item in items])
        return cls(
            torch.from_numpy(token_ids),
            row_index,
            row_values,
            torch.from_numpy(positions),
            torch.from_numpy(slots),
            torch.from_numpy(sampled),
            torch.from_numpy(last_S[[item.pending for item in items]]),
            torch.from_numpy(table),
            tuple(counts),
            tuple(stops),
            adapters if adapters != (BASE,) * len(adapters) else (),
            torch.from_numpy(np.concatenate(ropes, axis=1)) if ropes else None,
            _features(rows) if rows else None,
            tuple(
                [(place, *whole) for place, item in enumerate(items) for whole in item.atomic_spans]
            ),
            decoding=frozenset([place for place, item in enumerate(items) if item.decoding]),
            uncertain=tuple([item.uncertain for item in items]),
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
            None if self.rope is None else upload(self.rope, device),
            None if self.features is None else upload(self.features, device),
            self.atomic_spans,
            self.bidirectional_layers,
            self.decoding,
            self.uncertain,
        )


_ONE = [1]


def _block_table(
    items: Sequence[BatchItem], stops: Sequence[int], page_size: int
) -> npt.NDArray[np.int32]:
    """Return [N, S, longest]; raises as `Batch.pack` does."""
    needed = [-(-stop // page_size) for stop in stops]
    table = np.zeros((len(items[0].pages), len(items), max(needed)), dtype=np.int32)
    for place, item in enumerate(items):
        for group, run in enumerate(item.pages):
            count = needed[place] - run.first
            pages = run.pages if len(run.pages) == count else run.pages[:count]
            if len(pages) < count:
                raise EngineError(
                    f"{run.end} pages of {page_size} positions do not hold {stops[place]}"
                )
            table[group, place, run.first : needed[place]] = pages
    return table


def _last_of_each(last_S: npt.NDArray[np.int64], counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the last `counts` positions up to each of `last_S`, one after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.repeat(last_S + 1 - ends, counts) + np.arange(ends[-1])


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
    first = 0
    for _, segment in rows:
        _copy(segment.data, values[first : first + len(segment)])
        first += len(segment)
    return index, values


def _features(rows: list[tuple[int, Rows]]) -> Tensor | None:
    """Return the inner features of embedding vectors [K, R, C]; zero for those without any.

    Field `deepstack.k` of a bundle is for layer k. None if no bundle has one.
    """
    fields = [
        [field for field in segment.bundle if field.name != GRID_FIELD] for _, segment in rows
    ]
    levels = max(map(len, fields), default=0)
    if not levels:
        return None
    count, first = sum(len(segment) for _, segment in rows), 0
    dtype: torch.dtype = getattr(torch, rows[0][1].dtype)
    features = torch.zeros(levels, count, rows[0][1].shape[1], dtype=dtype)
    for (_, segment), own in zip(rows, fields, strict=True):
        for field in own:
            kind, _, level = field.name.partition(".")
            if kind != DEEPSTACK or not level.isdecimal() or int(level) >= levels:
                raise EngineError(f"the torch engine reads no field {field.name!r} of rows")
            _copy(field.data, features[int(level), first : first + len(segment)])
        first += len(segment)
    return features


def _copy(source: Buffer, target: Tensor) -> None:
    """Copy the bytes of rows into `target` [rows, C], contiguous."""
    found = np.frombuffer(source.view, dtype=np.uint8)
    target.view(torch.uint8).numpy()[:] = found.reshape(len(target), -1)
