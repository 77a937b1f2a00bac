"""The scheduler: which sequences the next step computes, and with which KV pages.

Pure Python: no tensors, no clock, no threads.

There is no prefill and no decode: a sequence has `num_pending_tokens` positions to compute before
its next token can be chosen, one for a sequence that decodes, many for one that is new or was
preempted. A step has one budget of positions. It goes

1. to sequences that were passed over `MAX_STARVED_STEPS` steps in a row, one of each client, so
   that none waits for ever;
2. to every running sequence with one position pending, so that streams flow whatever else arrives;
3. to the others, the rest in equal parts for their clients: half of a part to the first in order,
   so that a long prompt ends in bounded time, and half to those with the fewest positions pending,
   so that a short prompt does not wait for a long one.

Order is (priority, arrival). The scheme of computed positions that catch up with known ones is
vLLM's. Places and pages are shared among clients, as `inlay.engine.fairness` says: sequences of
clients beyond their share are preempted first.

A plan may be made before the results of the last are read. Then a sequence may have one position
more than is known of it, that of the token which the last plan chose. Until its results are read a
chunk is unread: its pages have no digests, and its sequence is not preempted; pages that it was
written to are scrubbed if its sequence ends meanwhile.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain, islice
from operator import attrgetter

from inlay.engine.fairness import SequencePages
from inlay.engine.torch.adapter_turns import AdapterTurns
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache.prefix_cache import PrefixCache
from inlay.engine.torch.cache.table import PageTable
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.fairness import StepShares, count_starved_step
from inlay.engine.torch.plan import PartialPlan, ScheduledChunk, SchedulerOutput, budget, yields
from inlay.engine.torch.prefix_lookup import Hits, PagesInProgress, PrefixLookup
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.start_needs import StartNeeds
from inlay.messages.prompt import split_point

MAX_STARVED_STEPS = 8
"""Steps in a row in which a sequence may be passed over before it goes first."""

_by_order = attrgetter("order")


class Scheduler:
    """Running and waiting sequences, and the pages they hold.

    `schedule`, run the plan, `commit` or `invalidate`; `finish` the sequences that ended.

    Attributes:
        table: holders of each page; changed by the scheduler alone, but for scrubbing.
        cache: pages by prefix; empty for ever without prefix caching.
        running: sequences that hold pages or may take them, in order.
        waiting: the others, in order.
        preemptions: number of times a sequence lost its pages.
        blocked: a sequence has to be preempted for the next plan, and has unread chunks.
        start_needs: finds what sequences need before they start.
    """

    def __init__(
        self,
        bounds: EngineLimits,
        *,
        prefix_caching: bool = True,
        events: CacheEventQueue | None = None,
        max_loras: int | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """No sequences yet.

        Args:
            bounds: of sequences, positions and pages.
            prefix_caching: look prefixes up.
            events: records of pages that the cache gains and loses.
            max_loras: adapters in one step at most, None for any number.
            speculator: drafts tokens of sequences that decode. With it, a plan may be made only
                after the results of the last are read.
        """
        self.bounds = bounds
        self._adapter_turns = None if max_loras is None else AdapterTurns(max_loras)
        self.cache = PrefixCache(len(bounds.windows), None if events is None else events.removed)
        self._events = events
        self._lookup = PrefixLookup(self.cache, bounds)
        self.table = PageTable(bounds.num_pages, self.cache)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self.blocked = False
        self.start_needs = StartNeeds(bounds.page_size)
        self._clients: Counter[str | None] = Counter()
        self._shares = StepShares(bounds, self._clients, self.running, self._pages_outstanding)
        self._prefix_caching = prefix_caching
        self._speculator = speculator
        self._in_progress = PagesInProgress(bounds.page_size)
        self._num_plans = 0
        self._has_windows = any(window is not None for window in bounds.windows)

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def admit(self, sequence: Sequence) -> None:
        """Add a sequence that needs nothing; `EngineLimits.check` has passed."""
        sequence.admitted = True
        self._clients[sequence.client] += 1
        insort(self.waiting, sequence, key=_by_order)

    @property
    def spare(self) -> int:
        """Number of pages that can be taken beside those that running sequences still need."""
        return max(0, self.table.available - sum(map(self._pages_outstanding, self.running)))

    def hits(self, sequence: Sequence) -> Hits | None:
        """Return the cached pages with which a sequence that has not started could begin."""
        return self._lookup.hits(sequence)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step.

        Empty only when each sequence has unread chunks alone, is paused, or needs something.
        """
        self.blocked = False
        self.start_needs.asked = []
        self._shares.stale = True
        self._start_waiting()
        for sequence in self.running:
            sequence.pending = sequence.num_pending_tokens
            if sequence.pending > 1:
                self._skip_cached(sequence)
        plan = self._plan()
        for sequence in self.running:
            planned = sequence.planned_in == plan.number
            if planned or not sequence.pending or not plan.lacks(sequence):
                sequence.starved_steps = 0
            else:
                count_starved_step(sequence)
        for sequence, chunk in plan.chunks.items():
            sequence.num_computed_tokens = chunk.start + chunk.count
            sequence.unread.append(chunk)
        return SchedulerOutput(tuple(plan.chunks.values()))

    def unschedule_last(self, chunk: ScheduledChunk) -> None:
        """Nothing is sampled after `chunk`, the last that was planned of its sequence.

        Its last position is computed again.
        """
        chunk.sequence.num_computed_tokens -= 1

    def accept_drafts(self, chunk: ScheduledChunk, accepted: int) -> ScheduledChunk:
        """Return `chunk`, read next, with its first `accepted` drafts; others are computed over."""
        rejected = len(chunk.drafts) - accepted
        chunk.sequence.num_computed_tokens -= rejected
        return ScheduledChunk(chunk.sequence, chunk.start, chunk.count - rejected, chunk.samples)

    def commit(self, chunk: ScheduledChunk, *, unscheduled: bool = False) -> None:
        """The keys and values of `chunk`, the first unread of its sequence, are good.

        Name the pages it filled.

        Args:
            chunk: of a plan.
            unscheduled: its last position is computed again.
        """
        sequence, size = chunk.sequence, self.bounds.page_size
        sequence.unread.popleft()
        stop = chunk.start + chunk.count - unscheduled
        first, end = chunk.start // size, stop // size
        if first < end and self._prefix_caching:
            self._name_pages(sequence, range(first, end))
        if self._has_windows:
            self._free_passed_pages(sequence, stop)

    def _name_pages(self, sequence: Sequence, indices: Iterable[int]) -> None:
        for index in indices:
            digest = sequence.page_digest(index, self.bounds.page_size)
            if digest is not None:
                for group, run in enumerate(sequence.pages):
                    new = self.cache.insert(digest, run.pages[index - run.first], group)
                    if new and self._events is not None:
                        self._events.stored(sequence, index, group)
                self._in_progress.complete(digest, sequence)

    def mark_verified(self, chunk: ScheduledChunk) -> None:
        """Finite logits came out of the pages of its sequence up to the end of `chunk`."""
        if chunk.count == 1 and chunk.start % self.bounds.page_size:
            return  # the page of the position before it has been
        sequence, end = chunk.sequence, self.bounds.pages_for(chunk.start + chunk.count)
        for run in sequence.pages:
            self.table.mark_verified(run.since(sequence.num_verified_pages, end))
        # The last page may be filled further, and is proven again then.
        sequence.num_verified_pages = max(0, end - 1)

    def invalidate(self, chunk: ScheduledChunk) -> None:
        """The logits of `chunk` are not finite.

        Its pages are scrubbed before anyone else has them. Not committed; its sequence is finished
        next.
        """
        sequence, written = chunk.sequence, chunk.start // self.bounds.page_size
        for group, run in enumerate(sequence.pages):
            self.table.invalidate(run.since(written), keep_verified=False)
            # What a window has passed before finite logits came is known by its digests only, also
            # what it found in the cache: who computed that may have left without logits.
            passed = range(sequence.num_verified_pages, run.first)
            self.table.invalidate(self._lookup.found(sequence, group, passed), keep_verified=True)
            self.table.invalidate(run.pages[: written - run.first], keep_verified=True)

    def finish(self, sequence: Sequence) -> None:
        """`sequence` has ended; its pages are free, or idle in the cache, at once."""
        if not sequence.admitted:
            return
        self._in_progress.ended(sequence)
        self._clients[sequence.client] -= 1
        if not self._clients[sequence.client]:
            del self._clients[sequence.client]
        try:
            _remove(self.waiting, sequence)
        except ValueError:
            self._stop(sequence)

    def _start_waiting(self) -> None:
        if not self.waiting:
            return
        promised = sum(map(self._pages_outstanding, self.running))
        kept_for: set[str | None] = set()
        for sequence in self._candidates():
            full = len(self.running) >= self.bounds.max_num_seqs
            if full and (self.blocked or not self._shares.preemptible_for_slot(sequence)):
                # It waits for a place: what it needs may come meanwhile.
                if sequence.media is not None and not sequence.needs:
                    hits = self._lookup.hits(sequence)
                    self.start_needs.ask_rows(sequence, 0 if hits is None else hits.stop)
                return
            if sequence.needs or sequence.client in kept_for:
                continue
            hits = self._lookup.hits(sequence)
            cached = 0 if hits is None else hits.stop
            if self._in_progress.wait(sequence, cached):
                continue
            if sequence.media is not None and self.start_needs.ask_rows(sequence, cached):
                continue
            found: Collection[int] = () if hits is None else hits
            start = cached * self.bounds.page_size
            pages = SequencePages(found, self.bounds.pages_missing(start, sequence.length))
            if kept_for and self._shares.pages.excess(sequence, pages) > 0:
                continue
            # Even if what it finds is in use; to look at each page takes long.
            short = pages.lacking + promised - self.table.available
            # Alone it fits, if need be by smaller chunks.
            if full or (
                self.running and (short > 0 or short + self.table.num_unreferenced(found) > 0)
            ):
                if self.blocked:
                    continue  # the next plan is made when what is launched has been read
                chosen = self._shares.preempted_for(sequence, pages, short, self.table, full=full)
                if chosen is None or not all(map(self._preempt, chosen)):
                    count_starved_step(sequence)
                    # Others may start before it for a while; then the pages that come free are kept
                    # for it, but for clients within their share.
                    if sequence.starved_steps >= MAX_STARVED_STEPS:
                        kept_for.add(sequence.client)
                    continue
                promised = sum(map(self._pages_outstanding, self.running))
            if sequence.may_restore and self.start_needs.ask_pages(sequence, cached):
                continue
            self._begin(sequence, hits)
            promised += self._pages_outstanding(sequence)

    def _begin(self, sequence: Sequence, hits: Hits | None) -> None:
        _remove(self.waiting, sequence)
        insort(self.running, sequence, key=_by_order)
        self._shares.stale = True
        sequence.starved_steps = 0
        sequence.start()
        if hits is not None:
            self._use_cached(sequence, hits)
        if self._prefix_caching:
            self._in_progress.add(sequence, self._num_committed(sequence))

    def pause(self, sequence: Sequence, paused: bool) -> None:
        """Plan nothing more of a sequence, or go on with it."""
        sequence.paused = paused
        if paused:
            self._in_progress.paused(sequence)

    def _candidates(self) -> Iterable[Sequence]:
        """Sequences to look at in this step: none that is paused; by their shares of places."""
        order = self.waiting
        if len(self._clients) > 1:
            running = set(self.running)
            shares = self._shares.of_places(chain(self.running, self.waiting))
            order = [sequence for sequence in shares.order if sequence not in running]
        return tuple(islice((one for one in order if not one.paused), self.bounds.max_num_seqs))

    def _preempt(self, sequence: Sequence) -> bool:
        """Take the pages away; False while some of its chunks are unread.

        Full pages stay in the cache while there is room.
        """
        if sequence.unread:
            self.blocked = True
            return False
        self._stop(sequence)
        sequence.begin_again()
        sequence.may_restore = self.start_needs.is_kept is not None
        self.preemptions += 1
        insort(self.waiting, sequence, key=_by_order)
        return True

    def _stop(self, sequence: Sequence) -> None:
        self._shares.stale = True
        _remove(self.running, sequence)
        self._in_progress.remove(sequence, self._num_committed(sequence))
        for chunk in sequence.unread:
            first = chunk.start // self.bounds.page_size
            end = self.bounds.pages_for(chunk.start + chunk.count)
            for run in sequence.pages:
                self.table.invalidate(run.since(first, end), keep_verified=False)
        sequence.unread.clear()
        self.table.release(sequence.pages)

    def _pages_outstanding(self, sequence: Sequence) -> int:
        """Pages a running sequence lacks for all positions but those of later tokens."""
        computed = sequence.num_computed_tokens
        known = max(computed, sequence.length + sequence.has_pending_token)
        return self.bounds.pages_missing(computed, known)

    def _free_passed_pages(self, sequence: Sequence, computed: int) -> None:
        """Positions up to `computed` are, and are read.

        Pages that windows have passed are free, or idle in the cache.
        """
        for group, run in enumerate(sequence.pages):
            self.table.advance(run, self.bounds.first_page(group, computed))

    def _use_cached(self, sequence: Sequence, hits: Hits) -> None:
        size = self.bounds.page_size
        first = sequence.num_computed_tokens // size
        sequence.num_computed_tokens = hits.stop * size
        sequence.forget_cached()
        self._free_passed_pages(sequence, sequence.num_computed_tokens)
        for run, pages in zip(sequence.pages, hits.pages, strict=True):
            self.table.share(run, pages)
        for index in range(first, hits.stop):
            digest = sequence.page_digest(index, size)
            if digest is not None:
                self._in_progress.complete(digest, sequence)
        if not sequence.preemptions:
            cached = sequence.cached_tokens + (hits.stop - first) * size
            sequence.cached_tokens = min(len(sequence.prompt), cached)

    def _skip_cached(self, sequence: Sequence) -> None:
        """Take pages that another sequence has computed since `sequence` started."""
        hits = None if sequence.unread else self._lookup.hits(sequence)
        if hits is not None:
            self._use_cached(sequence, hits)
            sequence.pending = sequence.num_pending_tokens

    def _num_committed(self, sequence: Sequence) -> int:
        return sequence.unread[0].start if sequence.unread else sequence.num_computed_tokens

    def _plan(self) -> PartialPlan:
        if (turns := self._adapter_turns) is None:
            return self._plan_without(frozenset())
        plan = self._plan_without(turns.choose(self.running))
        if plan.resting and not plan.chunks and not any(one.unread for one in self.running):
            # Those that rest hold the pages that the others lack.
            for sequence in tuple(self.running):
                if sequence.request.adapter in plan.resting and not plan.chunks:
                    plan = self._plan_without(turns.give(sequence.request.adapter))
        return plan

    def _plan_without(self, resting: frozenset[str]) -> PartialPlan:
        self._num_plans += 1
        left, waits = budget(self.bounds, self.running), yields(self._num_plans, self.running)
        plan = PartialPlan(self._num_plans, left, resting, waits)
        self._schedule_starved(plan)
        self._schedule_decodes(plan)
        self._schedule_prefills(plan)
        if self._speculator is not None:
            self._speculator.extend(plan, self.table, self.bounds.page_size, len(self.running))
        return plan

    def _schedule_starved(self, plan: PartialPlan) -> None:
        """Plan a part of each client's longest passed-over sequence, if that is too long."""
        overdue = [one for one in self.running if one.starved_steps >= MAX_STARVED_STEPS]
        overdue.sort(key=lambda sequence: (-sequence.starved_steps, sequence.order))
        planned: set[str | None] = set()
        for sequence in overdue:
            if plan.lacks(sequence) and sequence.client not in planned:
                planned.add(sequence.client)
                self._schedule(
                    plan, sequence, self.bounds.max_num_batched_tokens // (4 * len(self._clients))
                )

    def _schedule_decodes(self, plan: PartialPlan) -> None:
        """Plan those with one position pending."""
        some_wait, size = plan.yields or plan.resting, self.bounds.page_size
        for sequence in tuple(self.running):
            if sequence.pending != 1 or sequence.planned_in == plan.number:
                continue
            start = sequence.num_computed_tokens
            if some_wait or start < sequence.prompt_length or not start % size:
                if plan.lacks(sequence):
                    self._schedule(plan, sequence, 1)
            elif plan.left:
                # No atomic segment is after the prompt, and the position before it has a page.
                plan.add(sequence, 1)

    def _schedule_prefills(self, plan: PartialPlan) -> None:
        """Plan those with many positions pending, clients in equal parts."""
        lines: dict[tuple[int, str | None], list[Sequence]] = {}
        for sequence in self.running:
            if sequence.planned_in == plan.number or not sequence.pending:
                continue
            if plan.lacks(sequence):
                lines.setdefault((sequence.order[0], sequence.client), []).append(sequence)
        if not lines:
            return
        clients = Counter(priority for priority, _ in lines)
        order = sorted(lines, key=lambda key: (key[0], sum(one.pending for one in lines[key])))
        for key in order:
            self._plan_line(plan, lines[key], -(-plan.left // clients[key[0]]))
            clients[key[0]] -= 1

    def _plan_line(self, plan: PartialPlan, line: list[Sequence], part: int) -> None:
        """Plan one client's: half of `part` for the first, the rest for the fewest pending."""
        # Lines before this one may have preempted some.
        line = [sequence for sequence in line if plan.lacks(sequence)]
        if not line or not part:
            return
        first, *others = line
        left = part - self._chunk(first, max(1, part // 2), plan.left)
        wanted: list[tuple[Sequence, int]] = []
        for sequence in sorted(others, key=lambda s: (s.pending, s.order)):
            count = self._chunk(sequence, left, left)
            left -= count
            if count:
                wanted.append((sequence, count))
        self._schedule(plan, first, part - sum(count for _, count in wanted))
        for sequence, count in wanted:
            if plan.lacks(sequence):
                self._schedule(plan, sequence, count)

    def _chunk(self, sequence: Sequence, want: int, limit: int) -> int:
        """Number of positions of `sequence` to compute.

        `want` of them if they end where it may be split.

        Else fewer; or, where an atomic segment comes first, all of it if that is within `limit`,
        else 0.
        """
        start = sequence.num_computed_tokens
        want = min(want, limit, sequence.pending)
        if want <= 0:
            return 0
        stop = split_point(sequence.atomic, start + want)
        if stop <= start:
            stop = next(end for first, end in sequence.atomic if first <= start < end)
        return stop - start if stop - start <= limit else 0

    def _schedule(self, plan: PartialPlan, sequence: Sequence, want: int) -> None:
        """Plan about `want` positions of `sequence`, with pages for them, or leave it out."""
        start, size = sequence.num_computed_tokens, self.bounds.page_size
        count = self._chunk(sequence, max(1, want), plan.left)
        end, groups = sequence.pages[0].end, len(sequence.pages)
        missing = self.bounds.pages_for(start + count) - end
        if missing * groups > self.table.available:
            self._make_room(plan, sequence, missing * groups)
            room = (end + self.table.available // groups) * size - start
            count = self._chunk(sequence, min(count, room), min(room, plan.left))
            missing = self.bounds.pages_for(start + count) - end
        if not count or not self.table.grow(sequence.pages, missing):
            return
        plan.add(sequence, count)

    def _make_room(self, plan: PartialPlan, sequence: Sequence, missing: int) -> None:
        """Preempt unplanned sequences after `sequence` until `missing` pages are available."""
        alone = len(self._clients) == 1
        for other in tuple(reversed(self.running if alone else self._shares.pages.order)):
            if other is sequence or self.table.available >= missing:
                return
            if other not in plan.chunks:
                if not self._preempt(other):
                    return
                other.planned_in = plan.number


def _remove(line: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a line in order, which may be long. Raises as `list.remove`."""
    place = bisect_left(line, sequence.order, key=_by_order)
    if place == len(line) or line[place] is not sequence:
        raise ValueError(f"{sequence.request.id!r} is not in the line")
    del line[place]
