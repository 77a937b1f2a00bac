"""`Core`: the whole engine except its thread.

Requests go in, `step` computes the scheduled chunks, outputs come out.
"""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Run
from dataclasses import asdict, replace

import torch
from msgspec import structs

from inlay.base.errors import DeadlineExceededError, EngineError, InlayError, NotFoundError
from inlay.engine.torch.adapters import LoraAdapters
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.decode_graphs import Capture, DecodeGraphs
from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.in_flight_step import Lookahead
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.needs import GRAMMAR, Need, Result
from inlay.engine.torch.pages.cached import CachedPages, MissingPages
from inlay.engine.torch.pages.copying import PageCopier, RecordShape
from inlay.engine.torch.plan import ScheduledChunk, Totals
from inlay.engine.torch.prompt_media import RopePositions
from inlay.engine.torch.results import Committer, Emitter
from inlay.engine.torch.runner import Runner
from inlay.engine.torch.sampling.chooser import TokenChooser
from inlay.engine.torch.sampling.sampler import Sampler
from inlay.engine.torch.sampling.token_sampler import TokenSampler
from inlay.engine.torch.scheduler import Scheduler
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import SpeculationCounts, Speculator
from inlay.messages.card import Stats
from inlay.messages.digest import Chain, Secret, root_digest
from inlay.messages.prompt import Rows
from inlay.messages.request import Output, Request

log = logging.getLogger(__name__)


class SequenceFactory:
    """Makes sequences for one model, in the order of their arrival."""

    def __init__(
        self, model: CausalModel, adapters: LoraAdapters, secret: Secret, *, prefix_caching: bool
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._secret = secret
        self._prefix_caching = prefix_caching
        self._arrivals = 0

    def make(
        self,
        request: Request,
        expires: float | None = None,
        grammar: GrammarState | None = None,
    ) -> Sequence:
        """Return a sequence of which nothing is computed.

        Raises `NotFoundError` if the adapter of `request` is not loaded. Arguments as `Sequence`'s.
        """
        chain = None
        model, name = self._model, request.adapter
        adapter = None if name is None else self._adapters.content_id(name)
        if self._prefix_caching:
            root = root_digest(
                self._secret,
                weights_id=model.weights_id,
                dtype=str(model.dtype).removeprefix("torch."),
                adapter=adapter,
                salt=request.salt,
            )
            chain = Chain(root, self._secret)
        sequence = Sequence(
            request,
            arrival=self._arrivals,
            chain=chain,
            expires=expires,
            page_groups=len(model.windows),
            grammar=grammar,
            rope=RopePositions(request.prompt) if model.rope_axes == 3 else None,
        )
        self._arrivals += 1
        return sequence


class Core:
    """A model, its pages, and the running requests. Used by one thread; deadlines are its user's.

    Attributes:
        bounds: limits, with the windows of the model's page groups.
        dtype: dtype of the model, as digests and metadata name it.
        adapters: the loaded adapters.
        cached: the pages of its prefix cache, for other workers.
        graphs: captured decode steps, or None.
        model: the model.
        pages: its keys and values.
        sampler: chooses tokens.
        scheduler: chooses the next chunks.
    """

    def __init__(
        self,
        model: CausalModel,
        bounds: EngineLimits,
        secret: Secret,
        *,
        prefix_caching: bool = True,
        capture: Capture | None = None,
        overlap: bool = False,
        events: CacheEventQueue | None = None,
        max_cpu_loras: int = 0,
        ask: Callable[[str, Need], object] | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """Allocate the pages.

        Args:
            model: the model.
            bounds: limits.
            secret: key of the digests.
            prefix_caching: True to reuse cached prefixes.
            capture: decode by captured graphs, if the model allows it.
            overlap: launch a step before the results of the last are read.
            events: records changes of the prefix cache.
            max_cpu_loras: maximum number of loaded adapters.
            ask: called with a request's id and what it needs; `fulfil` is to be called with the
                result, once.
            speculator: drafts tokens; then no step is launched before the last is read.
        """
        self.bounds = bounds = replace(bounds, windows=model.windows)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.model = model
        # Graphs need one page of their own for padding.
        self.pages = model.new_pages(bounds.num_pages + (capture is not None), bounds.page_size)
        self.graphs = (
            None if capture is None else DecodeGraphs.of(model, self.pages, bounds, capture)
        )
        if events is not None:
            events.begin(bounds.windows, bounds.page_size)
        self.scheduler = Scheduler(
            bounds,
            prefix_caching=prefix_caching,
            events=events,
            max_loras=None if model.lora is None else model.lora.slots,
            speculator=speculator,
        )
        shape = RecordShape.of(model.layers, model.page_groups, bounds.page_size, model.dtype)
        copier = PageCopier(self.pages, model.page_groups, shape)
        self.cached = CachedPages(self.scheduler, copier, events)
        self.adapters = LoraAdapters(model.lora, max_cpu_loras)
        self.sampler = Sampler(model.vocab_size, model.eos_token_ids, model.device)
        self._chooser = TokenChooser(self.sampler)
        self._ask = ask
        self._lookahead = Lookahead(overlap=overlap, speculator=speculator)
        self._totals = Totals()
        reader = None if speculator is None else speculator.reader
        self._runner = Runner(model, self.pages, self.graphs, self.adapters, self._chooser, reader)
        self._token_sampler = TokenSampler(self._chooser, self.scheduler, model, speculator)
        self._committer = Committer(self.scheduler)
        expect = None if speculator is None else self._chooser.expect
        self._emitter = Emitter(model.eos_token_ids, self._totals, expect, self._drop)
        self._factory = SequenceFactory(model, self.adapters, secret, prefix_caching=prefix_caching)
        self._sequences: dict[str, Sequence] = {}
        self._idle = False

    def __len__(self) -> int:
        """Number of running requests."""
        return len(self._sequences)

    def close(self) -> None:
        """Stop the threads."""
        self._chooser.close()

    def admit(
        self,
        request: Request,
        expires: float | None = None,
        grammar: GrammarState | None = None,
        needs: Iterable[Need] = (),
    ) -> list[Output]:
        """Add a request that `Admission.check` has accepted; `expires` is on the clock of `expire`.

        Nothing of it is computed until its `needs` are fulfilled. Raises `NotFoundError` if its
        adapter was unloaded meanwhile.

        Returns:
            The last output at once if the earlier output was already complete, else nothing.
        """
        sequence = self._factory.make(request, expires, grammar)
        reason = sequence.finish_reason(self.model.eos_token_ids)
        if reason is not None:
            return [sequence.make_output(finish_reason=reason)]
        self._sequences[request.id] = sequence
        sequence.needs.update(needs)
        if not sequence.needs:
            self.scheduler.admit(sequence)
        return []

    def fulfil(self, request_id: str, need: Need, result: Result) -> list[Output]:
        """Take what a request waits for; an error ends it, except of pages, which it computes.

        Does nothing if it has ended.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or need not in sequence.needs:
            return []
        self._idle = False
        try:
            if isinstance(result, Rows) and sequence.media is not None:
                sequence.media.put(need.key, result)
            elif isinstance(result, GrammarState):
                sequence.grammar = result
        except EngineError as error:
            result = error
        if isinstance(result, InlayError) and need.kind != "pages":
            return [self._emitter.fail(sequence, result)]
        sequence.needs.discard(need)
        if not (sequence.needs or sequence.admitted):
            self.scheduler.admit(sequence)
        return []

    def find_missing_pages(self, request: Request) -> MissingPages:
        """Return the pages that an admitted request would have to compute.

        Of a prefetch, which is not admitted, all of the prompt. Raises `NotFoundError` if the
        adapter of a prefetch was unloaded, or the request has ended.
        """
        if request.prefetch:
            # The last position is computed too: another token follows, whatever it is.
            request = structs.replace(request, prior_output=(*request.prior_output, 0))
            return self.cached.find_missing_pages(self._factory.make(request))
        sequence = self._sequences.get(request.id)
        if sequence is None:
            raise NotFoundError(f"the request {request.id!r} has ended")
        return self.cached.find_missing_pages(sequence)

    def abort(self, request_id: str) -> list[Output]:
        """End a request now; its pages are free before the next step.

        Does nothing for unknown ids.
        """
        sequence = self._sequences.get(request_id)
        return [] if sequence is None else [self._abort(sequence)]

    def pause(self, request_id: str, paused: bool) -> list[Output]:
        """Plan nothing more of a request, or go on with it. Does nothing for unknown ids."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self.scheduler.pause(sequence, paused)
            self._idle = False
        return []

    def abort_all(self) -> list[Output]:
        """End every request."""
        return [self._abort(sequence) for sequence in tuple(self._sequences.values())]

    def _abort(self, sequence: Sequence) -> Output:
        self._drop(sequence)
        return sequence.make_output(finish_reason="abort")

    def fail_all(self, error: InlayError) -> list[Output]:
        """End every request with `error`, after a step has failed.

        The core must not be used afterwards.
        """
        outputs = [sequence.make_output(error=error) for sequence in self._sequences.values()]
        self._sequences.clear()
        return outputs

    def rest(self, now: float) -> float | None:
        """Return the seconds for which nothing can be computed, None for ever, unless asked.

        `now` is on the clock of the requests' `expires`.
        """
        if len(self) and not self._idle:
            return 0
        ends = [each.expires for each in self._sequences.values() if each.expires is not None]
        return max(0.0, min(ends) - now) if ends else None

    def expire(self, now: float) -> list[Output]:
        """End the requests whose deadline has passed `now`, on the clock of their `expires`."""
        late = [
            sequence
            for sequence in self._sequences.values()
            if sequence.expires is not None and sequence.expires <= now
        ]
        return [self._emitter.fail(sequence, _too_late(sequence)) for sequence in late]

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Launch a step and return the outputs of one: with overlap, of the step before.

        The device computes a step while the host reads the last one, whose tokens it takes from the
        device. The next tokens are sampled after the last step is read, so that sampling may depend
        on all earlier tokens.

        Raises `Exception`: any error of the model; only `fail_all` may be called afterwards.
        """
        began = time.perf_counter()
        self._idle = False
        before = self._lookahead.unread
        if not self._sequences:
            self._lookahead.push(None)
            return []
        plan = None if before is not None and self.scheduler.blocked else self._schedule()
        flight = None if plan is None else self._runner.run(plan, before)
        done = self._lookahead.push(flight)
        self._idle = flight is None and before is None
        if self._idle:
            self._check_waits()
        outputs: list[Output] = []
        if done is not None:
            runs = self._token_sampler.sample(done)
            self._committer.commit(runs)
            outputs = self._emitter.emit(runs)
        if self._lookahead.unread is not None:
            self._token_sampler.draw(self._lookahead.unread)
        if self._lookahead.speculator is not None and done is not None:
            self._lookahead.speculator.timed(done.chunks, time.perf_counter() - began)
        return outputs

    def _schedule(self) -> Run[ScheduledChunk] | None:
        """Plan a step, and have its pages ready; None if nothing can be computed now."""
        dirty = self.scheduler.table.take_dirty()
        if dirty:
            self.model.scrub(self.pages, dirty)
        chunks = self.scheduler.schedule().chunks
        if self.cached.offloading is not None:
            self.cached.offloading.copy()
        for sequence, need in self.scheduler.start_needs.asked:
            if self._ask is None:
                raise EngineError("the engine has no encoder of images")
            self._ask(sequence.request.id, need)
        if not chunks:
            return None
        self._totals.add_step(chunks)
        return chunks

    def _check_waits(self) -> None:
        """Raise `EngineError` if nothing is computed, and no sequence waits for anything."""
        if any(sequence.waits for sequence in self._sequences.values()):
            return
        for sequence in self._sequences.values():
            pages = [(run.first, run.end) for run in sequence.pages]
            log.error("%r has pages %s of (first, end), and is not planned", sequence, pages)
        raise EngineError(f"none of {len(self._sequences)} requests could be scheduled")

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter.

        Raises `EngineError` if a request uses it, `NotFoundError` if it is not loaded.
        """
        if any(sequence.request.adapter == name for sequence in self._sequences.values()):
            raise EngineError(f"the adapter {name!r} is in use")
        self.adapters.remove(name)

    def reset_prefix_cache(self) -> int:
        """Evict the cached pages that no request uses; return their number."""
        return self.scheduler.table.reset_cache()

    def stats(self) -> Stats:
        """Return the current counters."""
        table = self.scheduler.table
        speculator = self._lookahead.speculator
        drafts = SpeculationCounts() if speculator is None else speculator.counts
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_used=table.used,
            blocks_total=table.num_pages,
            preemptions=self.scheduler.preemptions,
            num_drafts=drafts.drafts,
            num_draft_tokens=drafts.draft_tokens,
            num_accepted_tokens=drafts.accepted_tokens,
            num_forced_draft_tokens=drafts.forced_draft_tokens,
            num_forced_accepted_tokens=drafts.forced_accepted_tokens,
            **asdict(self._totals),
        )

    def _drop(self, sequence: Sequence) -> None:
        sequence.ended = True
        self.scheduler.finish(sequence)
        self._chooser.forget(sequence)
        if self._lookahead.speculator is not None:
            self._lookahead.speculator.forget(sequence)
        del self._sequences[sequence.request.id]


def _too_late(sequence: Sequence) -> InlayError:
    if GRAMMAR in sequence.needs:
        return DeadlineExceededError("the deadline passed before the grammar was compiled")
    return DeadlineExceededError("the deadline passed before the output was complete")
