"""A scheduler over simulated pages.

What each slot holds is checked against what the sequence says it must hold.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.pages.cached import CachedPages, PageBatch
from inlay.engine.torch.pages.copying import RecordPart, RecordShape
from inlay.engine.torch.plan import ScheduledChunk, SchedulerOutput
from inlay.engine.torch.scheduler import Scheduler
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.windows import first_seen, size_of
from inlay.messages.digest import Chain, Secret, root_digest
from inlay.messages.prompt import Buffer, Prompt, Rows, Segment, Tokens
from inlay.messages.request import Request, Sampling

SECRET = Secret(bytes(32))
POISON = 99
"""A token that makes keys and values non-finite."""


END = 7
"""A token that ends an output."""

Flight = list[tuple[ScheduledChunk, bool]]
"""The chunks of a step, and True for those with non-finite results."""


MAX_DRAFTS = 20
"""Maximum number of guessed tokens of a sequence."""


class Guesses:
    """A drafter of the tokens that a simulation will choose; often one of them is wrong."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation

    def available(self, sequence: Sequence, limit: int) -> int:
        return max(0, min(limit, len(self.simulation.items(sequence)) % (MAX_DRAFTS + 1)))

    def draft(self, counts: Mapping[Sequence, int], room: int) -> dict[Sequence, tuple[int, ...]]:
        found: dict[Sequence, tuple[int, ...]] = {}
        for sequence, count in counts.items():
            items = self.simulation.items(sequence)
            drafts: list[int] = []
            for _ in range(count):
                drafts.append(self.simulation.next([*items, *drafts]))
            if drafts and len(items) % 3:
                drafts[len(items) % len(drafts)] ^= 1
            found[sequence] = tuple(drafts)
        return found

    def forget(self, sequence: Sequence) -> None:
        """It keeps nothing."""


def rows(*values: int, atomic: bool = False) -> Rows:
    return Rows(Buffer(bytes(values)), "float8_e4m3fn", (len(values), 1), atomic=atomic)


def bounds(**changes: Any) -> EngineLimits:
    values: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "page_size": 16,
        "num_pages": 16,
    }
    return EngineLimits(**(values | changes))


def pages_of(sequence: Sequence) -> list[int]:
    return [page for run in sequence.pages for page in run.pages]


class SlotCopier:
    """`PageCopier` of simulated pages."""

    def __init__(self, slots: list[list[object]], limits: EngineLimits) -> None:
        self.shape = RecordShape(
            "simulated", ((RecordPart(torch.uint8, 1),),) * len(limits.windows)
        )
        self._slots = slots

    def write(
        self,
        sealer: object,
        group: int,
        page_ids: Iterable[int],
        digests: object,
        records: "npt.NDArray[np.object_]",
    ) -> int:
        for page, content in zip(page_ids, records[:, 0], strict=True):
            self._slots[page] = list(content)
        return len(records)


class Simulation:
    """A scheduler, and what a model would have written where.

    A slot holds the whole prefix up to its position, as keys and values do in effect, for the
    layers of one page group.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        prefix_caching: bool = True,
        overlap: bool = False,
        ends: bool = False,
        lateness: bool = False,
        events: CacheEventQueue | None = None,
        max_loras: int | None = None,
        speculates: bool = False,
    ) -> None:
        """No sequences yet.

        Args:
            limits: what fits.
            prefix_caching: whether pages are named.
            overlap: whether the results of a plan are read after the next plan has been run.
            ends: whether outputs end by themselves now and then.
            lateness: whether now and then nothing is chosen for who could have gone on.
            events: note what the cache gains and loses.
            max_loras: adapters in a plan at most.
            speculates: whether next tokens are guessed, sometimes rightly.
        """
        self.bounds = limits
        self.max_loras = max_loras
        self.overlap = overlap
        self.ends = ends
        self.lateness = lateness
        self.flight: Flight = []
        self.chosen: dict[Sequence, int] = {}
        self.accepted: dict[ScheduledChunk, list[int]] = {}
        self.speculates = speculates
        self.retracted: set[ScheduledChunk] = set()
        self.again: set[Sequence] = set()
        self.choices = 0
        self.scheduler = Scheduler(
            limits,
            prefix_caching=prefix_caching,
            events=events,
            max_loras=max_loras,
            speculator=Speculator(Guesses(self), MAX_DRAFTS) if speculates else None,
        )
        self.slots: list[list[object]] = [
            [None] * limits.page_size for _ in range(limits.num_pages + 1)
        ]
        self.tainted: set[int] = set()
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.arrivals = 0

    def admit(
        self,
        *segments: Segment,
        max_tokens: int = 1,
        priority: int = 0,
        salt: str | None = None,
        adapter: str | None = None,
        client: str | None = None,
    ) -> Sequence:
        request = Request(
            id=str(self.arrivals),
            prompts=(Prompt.of(*segments),),
            params=Sampling(max_tokens=max_tokens),
            salt=salt,
            priority=priority,
            adapter=adapter,
            client=client,
        )
        self.bounds.check(request)
        sequence = self.sequence_of(request)
        self.arrivals += 1
        self.scheduler.admit(sequence)
        self.live.append(sequence)
        return sequence

    def sequence_of(self, request: Request) -> Sequence:
        root = root_digest(
            SECRET,
            weights_id="w",
            dtype="float32",
            salt=request.salt,
            adapter=request.adapter,
        )
        chain = Chain(root, SECRET)
        groups = len(self.bounds.windows)
        return Sequence(request, arrival=self.arrivals, chain=chain, page_groups=groups)

    def fetch(self, *segments: Segment, salt: str | None = None, pages: int) -> None:
        """Take the first pages of a prompt from elsewhere, cut off after some, as `Fetch` does."""
        before = self.scheduler.spare
        prompt = Prompt.of(*segments)
        request = Request(id="x", prompts=(prompt,), params=Sampling(max_tokens=1), salt=salt)
        sequence = self.sequence_of(request)
        cached = CachedPages(self.scheduler, SlotCopier(self.slots, self.bounds))  # type: ignore[arg-type]
        lack = cached.find_missing_pages(sequence)
        assert lack.cached <= lack.stop <= sequence.max_cacheable // self.bounds.page_size
        items, reached = self.items(sequence), lack.stop
        for pieces in (lack.full(), None):
            for piece in lack.windows(reached) if pieces is None else pieces:
                count = min(pages, len(piece.digests))
                pages -= count
                content = np.empty((count, 1), object)
                for place in range(count):
                    start = (piece.first + place) * self.bounds.page_size
                    content[place, 0] = [
                        (piece.group, salt, None, tuple(items[: position + 1]))
                        for position in range(start, start + self.bounds.page_size)
                    ]
                done = 0
                while done < count:
                    rest = PageBatch(piece.group, piece.first + done, piece.digests[done:])
                    filled = cached.fill(None, lack, rest, content[done:])  # type: ignore[arg-type]
                    assert filled is not None
                    assert not filled.damaged
                    done += filled.pages
                if count < len(piece.digests):
                    reached = min(reached, piece.first + count)
        assert self.scheduler.spare == before

    def abort(self, sequence: Sequence) -> None:
        held = pages_of(sequence)
        shared = {page for other in self.live if other is not sequence for page in pages_of(other)}
        self.live.remove(sequence)
        self.scheduler.finish(sequence)
        assert pages_of(sequence) == []
        assert all(
            self.scheduler.table.references(page) == 0 for page in held if page not in shared
        )

    def items(self, sequence: Sequence) -> list[Any]:
        """Content of each position, with the sampled token that is not read yet."""
        found: list[Any] = []
        for start, segment in sequence.segments(0, sequence.length):
            assert start == len(found)
            if isinstance(segment, Tokens):
                found.extend(segment.ids)
            elif isinstance(segment, Rows):
                kind = bytes(segment.data.view) if segment.atomic else "row"
                found.extend((kind, value) for value in bytes(segment.data.view))
        return [*found, self.chosen[sequence]] if sequence.has_pending_token else found

    def named(self, sequence: Sequence, group: int, index: int) -> list[int]:
        """The page that the cache knows for a page index of `sequence`, if it does."""
        digest = sequence.page_digest(index, self.bounds.page_size)
        page = None if digest is None else self.scheduler.cache.find(digest, group)
        return [] if page is None else [page]

    def step(self) -> SchedulerOutput:
        """Plan and run; read the results, with `overlap` those of the step before."""
        before, self.flight = self.flight, []
        plan = SchedulerOutput(())
        if not (before and self.scheduler.blocked):
            for page in self.scheduler.table.take_dirty():
                self.tainted.discard(page)
                self.slots[page] = [None] * self.bounds.page_size
            plan = self.scheduler.schedule()
            self.check(plan, before)
        flight = [(span, self.run(span)) for span in plan.chunks]
        self.read(before)
        for span, _ in flight:
            if span.samples and span.sequence in self.live:
                self.choose(span)
        if self.overlap:
            self.flight = flight
        else:
            self.read(flight)
        return plan

    def choose(self, span: ScheduledChunk) -> None:
        """Return the token after a span, if one is sampled."""
        self.choices += 1
        if self.lateness and self.choices % 7 == 0:
            self.retracted.add(span)
            self.again.add(span.sequence)
            self.scheduler.unschedule_last(span)
            return
        items = self.items(span.sequence)
        if span.drafts:
            run = [self.next(items)]
            for draft in span.drafts:
                if run[-1] != draft or draft == END:
                    break
                run.append(self.next([*items, *run]))
            self.accepted[span] = run
        else:
            self.chosen[span.sequence] = self.next(items)
            span.sequence.has_pending_token = True

    def next(self, items: list[Any]) -> int:
        """Return the token after `items`."""
        number = sum(map(hash, items))
        return END if self.ends and number % 11 == 0 else number % 2

    def run(self, span: ScheduledChunk) -> bool:
        """Write what a span computes; whether what comes out is bad."""
        sequence = span.sequence
        items = [*self.items(sequence), *span.drafts]
        for group, run in enumerate(sequence.pages):
            assert not self.tainted & set(run.since(self.bounds.pages_for(span.start)))
            for position in range(span.start, span.start + span.count):
                index, slot = divmod(position, self.bounds.page_size)
                content = (
                    group,
                    sequence.request.salt,
                    sequence.request.adapter,
                    tuple(items[: position + 1]),
                )
                self.slots[run.pages[index - run.first]][slot] = content
        return span.samples and POISON in items

    def taint(self, sequence: Sequence) -> None:
        """Verified pages stay verified, whichever sequence fails on them.

        All else that it wrote is tainted, wherever it is now.
        """
        first = self.items(sequence).index(POISON) // self.bounds.page_size
        for group, run in enumerate(sequence.pages):
            self.tainted.update(run.since(first))
            for index in range(first, run.first):
                self.tainted.update(self.named(sequence, group, index))

    def read(self, flight: Flight) -> None:
        """The results of spans arrive."""
        flight = [(span, bad) for span, bad in flight if span.sequence in self.live]
        for span, bad in flight:
            if bad:
                self.taint(span.sequence)
                self.scheduler.invalidate(span)
        for span, bad in flight:
            sequence = span.sequence
            if bad:
                self.failed.append(sequence)
                self.live.remove(sequence)
                self.scheduler.finish(sequence)
                continue
            retracted = span in self.retracted
            self.retracted.discard(span)
            new = self.accepted.pop(span, [])
            for id_ in new:
                sequence.append(id_)
            kept = self.scheduler.accept_drafts(span, max(0, len(new) - 1)) if span.drafts else span
            if span.samples:
                self.scheduler.mark_verified(kept)
            self.scheduler.commit(kept, unscheduled=retracted)
            if span.samples and not retracted:
                if not new:
                    sequence.append(self.chosen.pop(sequence))
                if sequence.finish_reason((END,)) is not None:
                    self.live.remove(sequence)
                    self.ended.append(sequence)
                    self.scheduler.finish(sequence)

    def check(self, plan: SchedulerOutput, before: Flight) -> None:
        limits = self.bounds
        assert sum(span.count for span in plan.chunks) <= limits.max_num_batched_tokens
        assert len(plan.chunks) <= limits.max_num_seqs
        assert len({span.sequence for span in plan.chunks}) == len(plan.chunks)
        adapters = {span.sequence.request.adapter for span in plan.chunks} - {None}
        assert self.max_loras is None or len(adapters) <= self.max_loras
        assert before or bool(plan.chunks) == any(not each.paused for each in self.live)
        for span in plan.chunks:
            sequence, stop = span.sequence, span.start + span.count
            unread = sum(other.count for other, _ in before if other.sequence is sequence)
            assert span.count > 0
            assert stop == sequence.num_computed_tokens
            known = sequence.length + sequence.has_pending_token + len(span.drafts)
            assert stop <= known
            assert stop < len(sequence.prompt) + sequence.sampling.max_tokens
            assert span.samples == (stop == known)
            assert not any(first < stop < end for first, end in sequence.atomic)
            items = self.items(sequence)
            for group, (run, window) in enumerate(zip(sequence.pages, limits.windows, strict=True)):
                assert run.end == limits.pages_for(stop) or self.speculates
                assert limits.pages_for(stop) <= run.end <= limits.pages_for(stop + MAX_DRAFTS)
                seen = span.start - first_seen(window, span.start)
                for position in range(span.start - seen, span.start):
                    index, slot = divmod(position, limits.page_size)
                    content = (
                        group,
                        sequence.request.salt,
                        sequence.request.adapter,
                        tuple(items[: position + 1]),
                    )
                    assert index >= run.first
                    assert self.slots[run.pages[index - run.first]][slot] == content
                # From where it writes on, its pages are its own.
                for page in run.since(span.start // limits.page_size):
                    assert self.scheduler.table.references(page) == 1
                if (most := size_of(window)) is not None:
                    seen = most - 1 + unread + span.count + MAX_DRAFTS * self.speculates
                    assert len(run.pages) <= seen / limits.page_size + 2

    def consistent(self) -> None:
        scheduler, table = self.scheduler, self.scheduler.table
        held = [page for sequence in self.live for page in pages_of(sequence)]
        assert table.used == len(set(held))
        assert table.free + table.used + scheduler.cache.idle + table.dirty == table.num_pages
        assert table.references(0) == 0
        for page in range(1, table.num_pages + 1):
            assert table.references(page) == held.count(page)
            assert not (page in self.tainted and page in scheduler.cache)
        assert len(scheduler) == len(self.live)
        assert len(scheduler.running) <= self.bounds.max_num_seqs
        for sequence in self.live:
            unread = [span for span, _ in self.flight if span.sequence is sequence]
            again = sequence in self.again
            assert unread or sequence.num_computed_tokens < sequence.length
            for run, window in zip(sequence.pages, self.bounds.windows, strict=True):
                ends = [
                    self.bounds.pages_for(sequence.num_computed_tokens + extra)
                    for extra in range(1 + again + MAX_DRAFTS * self.speculates)
                ]
                assert run.end in ends
                if (most := size_of(window)) is not None:
                    seen = most - 1 + sum(span.count for span in unread)
                    seen += MAX_DRAFTS * self.speculates
                    assert len(run.pages) <= seen / self.bounds.page_size + 2
            assert len({page for run in sequence.pages for page in run.pages}) == len(
                pages_of(sequence)
            )
            assert again or not any(
                first < sequence.num_computed_tokens < end for first, end in sequence.atomic
            )
        for sequences in (scheduler.running, scheduler.waiting):
            assert sequences == sorted(sequences, key=lambda sequence: sequence.order)
        assert all(not pages_of(sequence) for sequence in scheduler.waiting)

    def drain(self, limit: int = 4000) -> int:
        steps = 0
        while self.live:
            assert steps < limit, f"not ended: {self.live}"
            self.step()
            self.consistent()
            steps += 1
        return steps
