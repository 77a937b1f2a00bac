"""`Core`: the whole engine except its thread.

Requests go in, `step` computes the scheduled chunks, outputs come out.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from dataclasses import asdict, replace

import torch
from msgspec import structs
from torch import Tensor

from inlay.card import Stats
from inlay.digest import Secret
from inlay.engine.torch import prompt_logprobs
from inlay.engine.torch.adapters import LoraAdapters
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache_events import CacheEvents
from inlay.engine.torch.decode_graphs import Capture, DecodeGraphs
from inlay.engine.torch.grammar.masks import GRACE
from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.hidden_states import Recorder
from inlay.engine.torch.in_flight_step import InFlightStep
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.pages.cached import CachedPages, Lack
from inlay.engine.torch.pages.copying import PageCopier, RecordShape
from inlay.engine.torch.plan import ScheduledChunk, Totals
from inlay.engine.torch.sampling.chooser import TokenChooser
from inlay.engine.torch.sampling.sampler import SampledToken, Sampler
from inlay.engine.torch.scheduler import Scheduler
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.sequence_factory import SequenceFactory
from inlay.engine.torch.speculation import AcceptedRun, SpeculationCounts, Speculator
from inlay.errors import DeadlineExceededError, EmbeddingsError, EngineError, InlayError
from inlay.prompt import Media, Rows
from inlay.request import FinishReason, Output, Payload, PromptLogprobs, Request


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
        events: CacheEvents | None = None,
        max_cpu_loras: int = 0,
        encode: Callable[[str, Media], None] | None = None,
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
            encode: called with a request's id and a run of an image that it needs the rows of;
                `encoded` is to be called with them, once.
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
        self._encode = encode
        self._overlap = overlap and speculator is None
        self._speculator = speculator
        self._reader = None if speculator is None else speculator.reader
        self._in_flight: InFlightStep | None = None
        self._factory = SequenceFactory(model, self.adapters, secret, prefix_caching=prefix_caching)
        self._sequences: dict[str, Sequence] = {}
        self._totals = Totals()
        self._idle = False

    def __len__(self) -> int:
        """Number of running requests."""
        return len(self._sequences)

    def close(self) -> None:
        """Stop the threads."""
        self._chooser.close()

    def admit(
        self, request: Request, expires: float | None = None, grammar: GrammarState | None = None
    ) -> list[Output]:
        """Add a request that `Admission.check` has accepted; `expires` is on the clock of `expire`.

        Raises `NotFoundError` if its adapter was unloaded meanwhile.

        Returns:
            The last output at once if the earlier output was already complete, else nothing.
        """
        sequence = self._factory.make(request, expires, grammar)
        reason = self._finish_reason(sequence)
        if reason is not None:
            return [sequence.make_output(finish_reason=reason)]
        self._sequences[request.id] = sequence
        self.scheduler.admit(sequence)
        return []

    def lack(self, request: Request) -> Lack:
        """Return the pages that `request` would have to compute; it is not admitted.

        Of a prefetch, all of the prompt. Raises `NotFoundError` if its adapter was unloaded.
        """
        if request.prefetch:
            # The last position is computed too: another token follows, whatever it is.
            request = structs.replace(request, prior_output=(*request.prior_output, 0))
        return self.cached.lack(self._factory.make(request))

    def abort(self, request_id: str) -> list[Output]:
        """End a request now; its pages are free before the next step.

        Does nothing for unknown ids.
        """
        sequence = self._sequences.get(request_id)
        return [] if sequence is None else [self._end(sequence, "abort")]

    def pause(self, request_id: str, paused: bool) -> list[Output]:
        """Plan nothing more of a request, or go on with it. Does nothing for unknown ids."""
        if (sequence := self._sequences.get(request_id)) is not None:
            sequence.paused, self._idle = paused, False
        return []

    def abort_all(self) -> list[Output]:
        """End every request."""
        return [self._end(sequence, "abort") for sequence in tuple(self._sequences.values())]

    def fail_all(self, error: InlayError) -> list[Output]:
        """End every request with `error`, after a step has failed.

        The core must not be used afterwards.
        """
        outputs = [sequence.make_output(error=error) for sequence in self._sequences.values()]
        self._sequences.clear()
        return outputs

    def encoded(self, request_id: str, digest: bytes, found: Rows | InlayError) -> list[Output]:
        """Take the rows of an image that a request asked for, or end it with an error.

        Does nothing if it has ended.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.media is None:
            return []
        self._idle = False
        if isinstance(found, Rows):
            try:
                sequence.media.put(digest, found)
                return []
            except EngineError as error:
                found = error
        return [self._end(sequence, error=found)]

    def restored(self, sequence: Sequence) -> None:
        """Let a preempted sequence go on: what was kept of it is in the cache."""
        self._idle = False
        self.scheduler.parking.ended(sequence)

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
        error = DeadlineExceededError("the deadline passed before the output was complete")
        return [self._end(sequence, error=error) for sequence in late]

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Launch a step and return the outputs of one: with overlap, of the step before.

        The device computes a step while the host reads the last one, whose tokens it takes from the
        device. The next tokens are sampled after the last step is read, so that sampling may depend
        on all earlier tokens.

        Raises `Exception`: any error of the model; only `fail_all` may be called afterwards.
        """
        began = time.perf_counter()
        before, self._in_flight = self._in_flight, None
        self._idle = False
        if not self._sequences:
            return []
        flight = None if before is not None and self.scheduler.blocked else self._launch(before)
        self._idle = flight is None and before is None
        waits = self.scheduler.parking or any(one.waits for one in self._sequences.values())
        if self._idle and not waits:
            raise EngineError(f"none of {len(self._sequences)} requests could be scheduled")
        outputs = [] if before is None else self._collect(before)
        if flight is not None:
            self._choose(flight)
            if self._overlap:
                self._in_flight = flight
            else:
                outputs += self._collect(flight)
            if self._speculator is not None:
                self._speculator.timed(flight.chunks, time.perf_counter() - began)
        return outputs

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
        drafts = SpeculationCounts() if self._speculator is None else self._speculator.counts
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

    def _launch(self, before: InFlightStep | None) -> InFlightStep | None:
        """Schedule a step and launch it.

        Returns None if nothing can be computed before the results of `before` are read.
        """
        dirty = self.scheduler.table.take_dirty()
        if dirty:
            self.model.scrub(self.pages, dirty)
        spans = self.scheduler.schedule().chunks
        self.cached.offload()
        for sequence, run in self.scheduler.to_encode:
            if self._encode is None:
                raise EngineError("the engine has no encoder of images")
            self._encode(sequence.request.id, run)
        if not spans:
            return None
        slots = self.adapters.place(span.sequence.request.adapter for span in spans)
        for span in spans:
            span.sequence.adapter = slots[span.sequence.request.adapter]
        self._chooser.prepare(
            span for span in spans if span.samples and not span.sequence.has_pending_token
        )
        recorder = Recorder.of(spans, self._reader)
        hidden, logits = self._forward(spans, before, recorder)
        self._totals.add_step(spans)
        scores = prompt_logprobs.score(self.model, hidden, spans)
        return InFlightStep(spans, hidden, logits, scores, recorder)

    def _forward(
        self,
        spans: Run[ScheduledChunk],
        before: InFlightStep | None,
        recorder: Recorder | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all positions, and the logits of the sampled ones."""
        batch = Batch.of(spans, self.bounds.page_size, bidirectional=self.model.bidirectional)
        pending = [span.sequence for span in spans if span.sequence.has_pending_token]
        chosen = None if before is None or not pending else before.chosen(pending)
        if recorder is None and self.graphs is not None and self.graphs.fits(batch):
            return self.graphs.run(batch, chosen)
        batch = self.model.upload(batch)
        if chosen is not None:
            batch.token_ids.index_copy_(0, batch.pending, chosen)
        if recorder is None:
            hidden = self.model.hidden(batch, self.pages)
        else:
            layers = self.model.decoder_layers
            with recorder.watching(layers, self.model.device):
                hidden = self.model.hidden(batch, self.pages)
            recorder.end(hidden, len(layers), self.model.projector)
        return hidden, self.model.logits(hidden[batch.sampled])

    def _choose(self, flight: InFlightStep) -> None:
        """Sample the next tokens of a step. All earlier tokens are known."""
        going = [span for span in flight.sampling if self._goes_on(span.sequence)]
        chosen = self._chooser.choose(flight.logits_of(going, 0), going)
        flight.choose(chosen)
        for span in chosen.late:
            # Its last position is computed again later, for its logits.
            flight.retracted.add(span)
            self.scheduler.retract(span)
        if self._speculator is None:
            self.model.settle(flight.kept({}))

    def _collect(self, flight: InFlightStep) -> list[Output]:
        """Read a step: commit finite results, end failed requests, return the outputs.

        Requests that ended meanwhile are skipped.
        """
        outcomes = [
            (span, of) for span, of in flight.read().items() if self._is_live(span.sequence)
        ]
        runs: Mapping[ScheduledChunk, AcceptedRun] = {}
        if self._speculator is not None:
            until = time.monotonic() + GRACE
            runs = self._speculator.accept(
                {span: of.choice for span, of in outcomes if of.good and span.drafts},
                lambda spans, place: self._chooser.choose(
                    flight.logits_of(spans, place), spans, until
                ),
                self._append,
            )
            self.model.settle(flight.kept({span: run.accepted for span, run in runs.items()}))
        for span, outcome in outcomes:
            if outcome.good:
                kept = self.scheduler.keep(span, runs[span].accepted) if span.drafts else span
                # First, as committing frees the pages that a window has passed.
                self.scheduler.mark_verified(kept)
                self.scheduler.commit(kept, retracted=span in flight.retracted)
        outputs: list[Output] = []
        for span, (good, scores, choice, states) in outcomes:
            if not good:
                outputs.append(self._invalidate(span))
                continue
            if span.drafts:
                outputs += self._emit_run(span.sequence, runs[span])
                continue
            payloads = () if states is None else states.take(span.sequence)
            if scores or (payloads and choice is None):
                outputs.append(self._emit_output(span.sequence, scores, payloads))
                payloads = ()
            if choice is not None:
                outputs.append(self._take(span.sequence, choice, payloads))
        return outputs

    def _is_live(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request.id) is sequence

    def _goes_on(self, sequence: Sequence) -> bool:
        return self._is_live(sequence) and len(sequence.output) < sequence.sampling.max_tokens

    def _emit_output(
        self, sequence: Sequence, told: PromptLogprobs | None, payloads: tuple[Payload, ...]
    ) -> Output:
        """Emit logprobs and hidden states of a prompt; the end, if nothing else was requested."""
        sequence.scored += 0 if told is None else len(told)
        reason = self._finish_reason(sequence)
        if reason is not None:
            self._totals.add_prompt(sequence)
            self._drop(sequence)
        return sequence.make_output(prompt_logprobs=told, payloads=payloads, finish_reason=reason)

    def _invalidate(self, span: ScheduledChunk) -> Output:
        self.scheduler.invalidate(span)
        error: InlayError = EngineError("the model's output is not finite")
        if any(isinstance(segment, Rows) for segment in span.sequence.prompt.segments):
            error = EmbeddingsError("the model's output for these embeddings is not finite")
        return self._end(span.sequence, error=error)

    def _take(
        self,
        sequence: Sequence,
        choice: SampledToken | InlayError,
        payloads: tuple[Payload, ...],
    ) -> Output:
        """Take the result of a step for one request: its next token, or its failure.

        Returns its output, which may be the last.
        """
        if isinstance(choice, InlayError):
            return self._end(sequence, error=choice)
        self._append(sequence, choice)
        return self._emit_tokens(sequence, [choice], payloads)

    def _append(self, sequence: Sequence, choice: SampledToken) -> FinishReason | None:
        """Append the next token; return the finish reason of the output, if it has ended."""
        if len(sequence.output) == len(sequence.request.prior_output):
            self._totals.add_prompt(sequence)
        self._totals.generated_tokens += 1
        sequence.append(choice.token_id)
        reason = self._finish_reason(sequence)
        if reason is None and self._speculator is not None:
            # What the grammar forces is to be known when the next step is planned.
            self._chooser.expect(sequence)
        return reason

    def _emit_run(self, sequence: Sequence, run: AcceptedRun) -> list[Output]:
        """Emit the tokens of a chunk with drafts, and the failure of the next one."""
        outputs = [self._emit_tokens(sequence, run.tokens)] if run.tokens else []
        if run.error is not None:
            outputs.append(self._end(sequence, error=run.error))
        return outputs

    def _emit_tokens(
        self,
        sequence: Sequence,
        tokens: Run[SampledToken],
        payloads: tuple[Payload, ...] = (),
    ) -> Output:
        """Emit appended tokens; the end, if the last of them ends the output."""
        reason = self._finish_reason(sequence)
        if reason is not None:
            self._drop(sequence)
            payloads = tuple(structs.replace(payload, last=True) for payload in payloads)
        logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
        return sequence.make_output(
            new=len(tokens), logprobs=logprobs, finish_reason=reason, payloads=payloads
        )

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        return sequence.finish_reason(self.model.eos_token_ids)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason | None = None,
        *,
        error: InlayError | None = None,
    ) -> Output:
        self._drop(sequence)
        return sequence.make_output(finish_reason=reason, error=error)

    def _drop(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._chooser.forget(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        del self._sequences[sequence.request.id]
