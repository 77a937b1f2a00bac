"""Drafts by a smaller model with the same tokens ("draft_model" in vLLM).

Leviathan et al. 2023, arXiv:2211.17192; drafts are the draft model's likeliest tokens.

Its keys and values lie in pages of its own with the numbers of the served model's: a sequence's
block table of layers without a window is for both. What the pages hold of a sequence is known here
alone, so that a prompt that the served model has cached is read by the draft model all the same.
Nothing of it decides an output: what is missing or stale there makes guesses worse, no more.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Segment, Tokens


@dataclass(slots=True)
class _Read:
    """A sequence as far as the pages hold it.

    Attributes:
        length: positions with keys and values.
        preemptions: of the sequence then; its pages are others after one.
        drafts: ids of the positions from `length` on, all but the last with keys and values.
    """

    length: int
    preemptions: int
    drafts: tuple[int, ...] = ()


class DraftModel:
    """A drafter with a model of its own. Arguments and results as for `Drafter`."""

    def __init__(
        self,
        model: CausalModel,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        group: int = 0,
    ) -> None:
        """Allocate the pages.

        Args:
            model: the draft model.
            num_pages: of the served model.
            page_size: positions in a page.
            vocab_size: of the served model; ids beyond it are not drafted.
            group: page group of the served model that keeps all positions.
        """
        self._model = model
        self._group = group
        self._pages = model.new_pages(num_pages, page_size)
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._read: dict[Sequence, _Read] = {}

    def available(self, sequence: Sequence, limit: int) -> int:
        """As `Drafter`; none of prompts that are not text alone."""
        if not all(isinstance(segment, Tokens) for segment in sequence.prompt.segments):
            return 0
        return max(0, min(limit, self._model.max_model_len - sequence.length))

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """As `Drafter`; a sequence of which more than `room` is not read yet has none."""
        items: list[BatchItem] = []
        found: dict[Sequence, list[int]] = {}
        for sequence in counts:
            first = self._known(sequence)
            # The last position is read in any case, as it is computed by the served model.
            stop = min(sequence.length, first + 1 + max(0, room))
            room -= stop - first - 1
            complete = stop == sequence.length
            if complete:
                found[sequence] = []
            parts = self._in_own_ids(sequence.segments(first, stop))
            pages = [sequence.pages[self._group]]
            items.append(BatchItem(parts, first, stop - first, pages, int(complete)))
            self._read[sequence] = _Read(stop, sequence.preemptions)
        going = list(found)
        while items:
            for sequence, draft in zip(going, self._likeliest(items), strict=True):
                found[sequence].append(draft)
            going = [sequence for sequence in going if len(found[sequence]) < counts[sequence]]
            items = []
            for sequence in going:
                place = sequence.length + len(found[sequence]) - 1
                last = [(place, Tokens([found[sequence][-1]]))]
                items.append(BatchItem(last, place, 1, [sequence.pages[self._group]], 1))
        for sequence, drafts in found.items():
            self._read[sequence].drafts = tuple(drafts)
        return {sequence: tuple(drafts) for sequence, drafts in found.items()}

    def forget(self, sequence: Sequence) -> None:
        self._read.pop(sequence, None)

    def _known(self, sequence: Sequence) -> int:
        """Return how many known positions have keys and values; the last one is not counted."""
        read = self._read.get(sequence)
        if read is None or read.preemptions != sequence.preemptions:
            return 0
        length = read.length
        for draft in read.drafts[:-1]:
            place = length - sequence.prompt_length
            if place >= len(sequence.output) or sequence.output[place] != draft:
                break
            length += 1
        return min(length, sequence.length - 1)

    def _in_own_ids(self, parts: Iterable[tuple[int, Segment]]) -> Iterator[tuple[int, Segment]]:
        """Yield parts of a sequence; ids that the draft model does not have become 0."""
        size = self._model.vocab_size
        for first, part in parts:
            if isinstance(part, Tokens) and max(part.ids, default=0) >= size:
                yield first, Tokens([id_ if id_ < size else 0 for id_ in part.ids])
            else:
                yield first, part

    def _likeliest(self, items: list[BatchItem]) -> list[int]:
        """Compute positions; return the likeliest next token of each that samples."""
        batch = self._model.upload(Batch.pack(items, self._pages.page_size))
        hidden = self._model.hidden(batch, self._pages)[batch.sampled]
        ids: list[int] = self._model.logits(hidden)[:, : self._vocab_size].argmax(-1).tolist()
        return ids


def check_draft_model(draft: CausalModel, served: CausalModel) -> None:
    """Refuse models whose pages cannot have the same numbers.

    Raises:
        InvalidRequestError: the served model keeps no position for ever, the draft model not all
            of them, or it reads more than text.
    """
    reasons = {
        "every layer of the model has a window; a draft model needs pages that hold all "
        "positions": None not in served.windows,
        "the draft model has layers with a window or a state; it needs full attention in every "
        "layer": draft.windows != (None,),
        "the draft model takes images; use a model of text alone": (
            draft.rope_axes > 1 or draft.takes_media
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise InvalidRequestError(f"--speculative-config: {reason}", param="speculative_config")
