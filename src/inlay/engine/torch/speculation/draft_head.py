"""Drafts by a head that reads hidden states of the served model.

EAGLE-3 heads (Li et al. 2025, arXiv:2503.01840) and multi-token prediction layers (DeepSeek-AI
2024, arXiv:2412.19437) are one thing: a layer that takes the served model's state of a position and
the embedding of the position after it, and guesses the token after that. Further tokens are guessed
from the head's own states.

The head's keys and values lie in pages of its own with the numbers of the served model's, so a
cached prefix is cached for the head too. Positions that it has not seen (pages from other workers,
the last position of a cached prefix, whose next token may be another) hold zeros or what was there
before. That makes guesses worse, no more: nothing of the head decides an output.

Shapes: T positions, C hidden size.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.attention.choice import attention
from inlay.engine.torch.attention.paged import PagedAttention
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.batch import Batch, BatchItem, Workspace
from inlay.engine.torch.cache.kv_layout import PageGroup
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.transfers import upload
from inlay.messages.prompt import Tokens


class DraftHead(Protocol):
    """A head, on the device and in the dtype of the served model.

    Attributes:
        layers: numbers of the served model's hidden states that it reads.
        shape: of the keys and values of its attention layer.
        table: its own look-up of token embeddings; None for the served model's.
    """

    layers: tuple[int, ...]
    shape: LayerShape

    @property
    def table(self) -> nn.Module | None:
        """As above."""

    def combine(self, states: Run[Tensor]) -> Tensor:
        """Return [T, C], what it takes of the served model's states, [T, C] for each layer."""

    def advance(
        self, embeds: Tensor, states: Tensor, positions: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Compute positions; return its states [T, C].

        Args:
            embeds: [T, C], embeddings of the positions after them.
            states: [T, C], of `combine` or its own.
            positions: int64, [T], or [3, T] of models that number them by three axes.
            paged: attention over its pages.
        """

    def likeliest(self, states: Tensor) -> Tensor:
        """Return int64 [N], the likeliest tokens two positions after its states [N, C]."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """Positions that the last step has computed: `first` is row `row` of it.

    The sequence had been preempted `preemptions` times.
    """

    first: int
    count: int
    row: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class _Tip:
    """The head's state [C] before the next token of a sequence of `length` known positions."""

    length: int
    preemptions: int
    state: Tensor


class HeadDrafter:
    """A drafter with a head, and the reader of its hidden states.

    Arguments and results as for `Drafter` and `StateReader`.
    """

    def __init__(self, head: DraftHead, model: CausalModel, num_pages: int, page_size: int) -> None:
        """Allocate the head's pages."""
        self.layers = head.layers
        self._head = head
        self._model = model
        self._group = model.windows.index(None)
        self._pages = Pages(
            (head.shape,),
            (PageGroup(None, (0,)),),
            num_pages=num_pages,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )
        # Positions that it has not seen must be finite.
        self._pages.scrub(range(num_pages + 1))
        self._workspace = Workspace()
        self._computed: dict[Sequence, _Computed] = {}
        self._states: Tensor | None = None
        self._tips: dict[Sequence, _Tip] = {}

    def observe(self, chunks: Run[ScheduledChunk], states: Run[Tensor]) -> None:
        """As `StateReader`; what depends on the next tokens is computed when they are known."""
        self._computed.clear()
        row = 0
        for chunk in chunks:
            preemptions = chunk.sequence.preemptions
            self._computed[chunk.sequence] = _Computed(chunk.start, chunk.count, row, preemptions)
            row += chunk.count
        self._states = torch.nan_to_num(self._head.combine(states))

    def available(self, sequence: Sequence, limit: int) -> int:
        """As `Drafter`; none before the served model has computed all but the last position."""
        self._catch_up()
        tip = self._tips.get(sequence)
        now = sequence.length, sequence.preemptions
        return limit if tip is not None and (tip.length, tip.preemptions) == now else 0

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """As `Drafter`; positions of the last step are read whatever the `room`."""
        self._catch_up()
        found: dict[Sequence, list[int]] = {sequence: [] for sequence in counts}
        going = list(counts)
        states = [self._tips[sequence].state for sequence in going]
        while going:
            own = torch.stack(states)
            for sequence, draft in zip(going, self._head.likeliest(own).tolist(), strict=True):
                found[sequence].append(draft)
            kept = [
                row for row, sequence in enumerate(going) if len(found[sequence]) < counts[sequence]
            ]
            going = [going[row] for row in kept]
            items = []
            for sequence in going:
                place = sequence.length + len(found[sequence]) - 2
                last = [(place, Tokens([found[sequence][-1]]))]
                run, rope = sequence.pages[self._group], sequence.rope(place, place + 1)
                items.append(BatchItem(last, place, 1, [run], 1, rope=rope))
            states = list(self._advance(items, own[kept])) if items else []
        return {sequence: tuple(drafts) for sequence, drafts in found.items()}

    def forget(self, sequence: Sequence) -> None:
        self._computed.pop(sequence, None)
        self._tips.pop(sequence, None)

    def _catch_up(self) -> None:
        """Compute the positions of the last step whose next tokens are known by now."""
        if self._states is None:
            return
        items: list[BatchItem] = []
        rows: list[int] = []
        complete: list[Sequence] = []
        for sequence, of in self._computed.items():
            stop = min(of.first + of.count, sequence.length - 1)
            count = stop - of.first
            if count <= 0 or sequence.preemptions != of.preemptions:
                continue
            # It reads the embedding of the position after each.
            parts = [(at - 1, part) for at, part in sequence.segments(of.first + 1, stop + 1)]
            ends = stop == sequence.length - 1
            run = sequence.pages[self._group]
            rope = sequence.rope(of.first, stop)
            items.append(BatchItem(parts, of.first, count, [run], int(ends), rope=rope))
            rows += range(of.row, of.row + count)
            if ends:
                complete.append(sequence)
        if items:
            index = upload(torch.tensor(rows), self._states.device)
            tips = self._advance(items, self._states[index])
            for sequence, state in zip(complete, tips, strict=True):
                self._tips[sequence] = _Tip(sequence.length, sequence.preemptions, state)
        self._computed.clear()
        self._states = None

    @torch.inference_mode()
    def _advance(self, items: list[BatchItem], states: Tensor) -> Tensor:
        """Compute positions with `states` [T, C]; return the head's own of those that sample."""
        batch = Batch.pack(items, self._pages.page_size).to(self._model.device)
        embeds = self._model.inputs(batch, self._head.table)
        paged = attention(batch, self._pages, self._workspace)
        positions = batch.positions if batch.rope is None else batch.rope
        return self._head.advance(embeds, states, positions, paged)[batch.sampled]


def check_served(model: CausalModel, method: str, *, follows_axes: bool = False) -> None:
    """Refuse a model that a head cannot follow.

    `follows_axes` says that the head's positions may be numbers on several axes too.

    Raises:
        InvalidRequestError: says why.
    """
    reasons = {
        "every layer of the model has a window; a head needs pages that hold all positions": (
            None not in model.windows
        ),
        "positions of the model are numbers on several axes, those of a head on one": (
            model.rope_axes > 1 and not follows_axes
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise refusal(method, reason)


def refusal(method: str, reason: str) -> InvalidRequestError:
    """Return the error that says why there are no drafts by `method`."""
    return InvalidRequestError(
        f"--speculative-config: {method}: {reason}", param="speculative_config"
    )
