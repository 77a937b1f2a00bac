"""The whole engine but its thread: works go in, `step` computes what the scheduler chose, deltas come out."""

import logging
from collections.abc import Sequence as Run
from dataclasses import replace
from itertools import compress, islice

import torch
from torch import Tensor

from inlay.digest import Chain, Secret, root_digest
from inlay.engine.torch import prompt_logprobs
from inlay.engine.torch.adapters import LoraAdapters
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.decode_graphs import Capture, DecodeGraphs
from inlay.engine.torch.grammar_state import GrammarState
from inlay.engine.torch.masks import Masks
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.sampler import Choice, Sampler
from inlay.engine.torch.scheduler import Bounds, Scheduler, Span
from inlay.engine.torch.sequence import Sequence
from inlay.errors import DeadlineExceededError, EmbeddingsError, EngineError, InlayError
from inlay.prompt import Rows
from inlay.protocol.work import Delta, FinishReason, PromptLogprobs, Stats, Work

log = logging.getLogger(__name__)


class Core:
    """A model, its pages, and the works under way. Used from one thread; keeps no clock.

    Attributes:
        bounds: what fits, with the windows of the model's page groups.
        dtype: of the model, by the name that digests and the card use.
        adapters: what the model holds of them.
        graphs: what decodes, where decoding can be captured.
        model: what computes.
        pages: its keys and values.
        sampler: what chooses.
        scheduler: who goes next.
    """

    def __init__(
        self,
        model: CausalModel,
        bounds: Bounds,
        secret: Secret,
        *,
        prefix_caching: bool = True,
        capture: Capture | None = None,
    ) -> None:
        """Make room; with `capture`, decode by graphs if the model can be captured."""
        self.bounds = bounds = replace(bounds, windows=model.windows)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.model = model
        # Graphs need a page of their own.
        self.pages = model.new_pages(bounds.num_pages + (capture is not None), bounds.page_size)
        self.graphs = None if capture is None else DecodeGraphs.of(model, self.pages, bounds, capture)
        self.scheduler = Scheduler(bounds, prefix_caching=prefix_caching)
        self.adapters = LoraAdapters(model.lora)
        self.sampler = Sampler(model.vocab_size, model.eos_token_ids, model.device)
        self._masks = Masks()
        self._secret = secret
        self._prefix_caching = prefix_caching
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._rows_served = 0
        self._generated_tokens = 0
        self._steps = 0
        self._progress = 0

    def __len__(self) -> int:
        """Works under way."""
        return len(self._sequences)

    def close(self) -> None:
        """End the threads."""
        self._masks.close()

    def admit(
        self, work: Work, expires: float | None = None, grammar: GrammarState | None = None
    ) -> list[Delta]:
        """Take a work that `Admission.check` has passed. Raises `NotFoundError` when its adapter has gone since.

        Args:
            work: what to generate.
            expires: when it fails, on the clock that `expire` is given.
            grammar: the state of the one it asks for, at the end of its earlier output.

        Returns:
            The last delta at once when the earlier output was already complete, else nothing.
        """
        chain = None
        adapter = self.adapters.of(work.adapter)
        if self._prefix_caching:
            root = root_digest(
                self._secret,
                weights_id=self.model.weights_id,
                dtype=self.dtype,
                adapter=adapter.content_id,
                salt=work.salt,
            )
            chain = Chain(root, self._secret)
        sequence = Sequence(
            work,
            arrival=self._arrivals,
            chain=chain,
            expires=expires,
            page_groups=len(self.bounds.windows),
            grammar=grammar,
            adapter=adapter.slot,
        )
        self._arrivals += 1
        reason = sequence.ending(self.model.eos_token_ids)
        if reason is not None:
            return [sequence.delta(finish_reason=reason)]
        self._sequences[work.id] = sequence
        self.scheduler.admit(sequence)
        return []

    def abort(self, work_id: str) -> list[Delta]:
        """End a work now, its pages free before the next step; nothing when it is not under way."""
        sequence = self._sequences.get(work_id)
        return [] if sequence is None else [self._end(sequence, "abort")]

    def abort_all(self) -> list[Delta]:
        """End every work."""
        return [self._end(sequence, "abort") for sequence in tuple(self._sequences.values())]

    def fail_all(self, error: InlayError) -> list[Delta]:
        """Tell every work that the engine is broken. Nothing else may be asked of it afterwards."""
        deltas = [sequence.delta(error=error) for sequence in self._sequences.values()]
        self._sequences.clear()
        return deltas

    def expire(self, now: float) -> list[Delta]:
        """End the works whose time is up.

        Args:
            now: on the clock of the works' `expires`.
        """
        late = [
            sequence
            for sequence in self._sequences.values()
            if sequence.expires is not None and sequence.expires <= now
        ]
        error = DeadlineExceededError("the deadline passed before the output was complete")
        return [self._end(sequence, error=error) for sequence in late]

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Compute one plan. Nothing happens when there are no works.

        Raises:
            Exception: what the model raised; nothing but `fail_all` may be asked of the core afterwards.
        """
        if not self._sequences:
            return []
        dirty = self.scheduler.table.take_dirty()
        if dirty:
            self.pages.scrub(dirty)
        plan = self.scheduler.schedule()
        if not plan.spans:
            raise EngineError(f"none of {len(self._sequences)} works could be scheduled")
        sampling = [span for span in plan.spans if span.samples]
        self._masks.prepare(span.sequence for span in sampling)
        batch = Batch.of(plan, self.bounds.page_size)
        hidden, logits = self._forward(batch)
        scores = prompt_logprobs.score(self.model, hidden, plan.spans)
        self._steps += 1
        self._progress += sum(span.count for span in plan.spans)

        late = self._masks.late([span.sequence for span in sampling])
        bad = {span for span, good in zip(sampling, _finite(logits), strict=True) if not good}
        bad |= {span for span, told in scores.items() if told is None}
        # At once, and for every position: a value that is not finite spoils the whole span, its tokens before that value
        # too (zero times NaN is NaN), and others share the pages of tokens as soon as they are committed.
        states = iter(_finite(hidden))
        bad |= {span for span in plan.spans if not all(list(islice(states, span.count)))}
        for span in plan.spans:
            if span not in bad:
                # Whoever waits for its mask computes its last position again, for logits to choose from.
                waits = span.samples and span.sequence in late
                self.scheduler.commit(replace(span, count=span.count - 1, samples=False) if waits else span)
                self.scheduler.prove(span.sequence)
        deltas = [self._condemn(span) for span in plan.spans if span in bad]
        deltas += [
            self._tell(span.sequence, told) for span, told in scores.items() if told and span not in bad
        ]
        deltas += [
            self._end(sequence, error=error)
            for sequence, error in late.items()
            if error is not None and sequence.work.id in self._sequences
        ]
        going = [span.sequence.work.id in self._sequences and span.sequence not in late for span in sampling]
        if not all(going):
            sampling = list(compress(sampling, going))
            logits = logits[torch.tensor(going, device=logits.device)]
        for span, choice in zip(sampling, self._sample(logits, sampling), strict=True):
            deltas.append(self._take(span.sequence, choice))
        return deltas

    def remove_adapter(self, name: str) -> None:
        """Let go of an adapter. Raises `EngineError` while a work uses it, `NotFoundError` when it is not there."""
        if any(sequence.work.adapter == name for sequence in self._sequences.values()):
            raise EngineError(f"the adapter {name!r} is in use")
        self.adapters.remove(name)

    def reset_prefix_cache(self) -> int:
        """Forget the cached pages no work uses; their number."""
        return self.scheduler.table.reset_cache()

    def stats(self) -> Stats:
        """The counters now."""
        table = self.scheduler.table
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_used=table.used,
            blocks_total=table.num_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            rows_served=self._rows_served,
            generated_tokens=self._generated_tokens,
            preemptions=self.scheduler.preemptions,
            steps=self._steps,
            progress=self._progress,
        )

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """All hidden states of a batch, and the logits of what it samples."""
        if self.graphs is not None and self.graphs.fits(batch):
            return self.graphs.run(batch)
        batch = batch.to(self.model.device)
        hidden = self.model.hidden(batch, self.pages)
        return hidden, self.model.logits(hidden[batch.sampled])

    def _tell(self, sequence: Sequence, told: PromptLogprobs) -> Delta:
        """Logprobs of a prompt; the end where nothing else was asked for."""
        sequence.scored += len(told)
        reason = sequence.ending(self.model.eos_token_ids)
        if reason is not None:
            self._count_prompt(sequence)
            self._drop(sequence)
        return sequence.delta(prompt_logprobs=told, finish_reason=reason)

    def _condemn(self, span: Span) -> Delta:
        self.scheduler.condemn(span)
        error: InlayError = EngineError("the model's output is not finite")
        if span.sequence.prompt.has_rows:
            error = EmbeddingsError("the model's output for these embeddings is not finite")
        return self._end(span.sequence, error=error)

    def _sample(self, logits: Tensor, spans: Run[Span]) -> list[Choice | InlayError]:
        """A choice for each span, or why there is none: one work's settings must not fail its neighbours."""
        sequences = [span.sequence for span in spans]
        if not sequences:
            return []
        try:
            return list(self.sampler.sample(logits, sequences))
        except Exception:
            log.exception("sampling %d works together failed; trying them one by one", len(sequences))
        found: list[Choice | InlayError] = []
        for index, sequence in enumerate(sequences):
            # What the sampler keeps of a work can be made again from its output, and may be half changed.
            self.sampler.forget(sequence)
            try:
                found.extend(self.sampler.sample(logits[index : index + 1], [sequence]))
            except Exception as error:
                log.exception("sampling for work %s failed", sequence.work.id)
                found.append(EngineError(f"the next token could not be chosen: {type(error).__name__}"))
        return found

    def _take(self, sequence: Sequence, choice: Choice | InlayError) -> Delta:
        """The outcome of a step for one work: its next token and perhaps its end, or its failure."""
        if isinstance(choice, InlayError):
            return self._end(sequence, error=choice)
        if len(sequence.output) == len(sequence.work.prior_output):
            self._count_prompt(sequence)
        self._generated_tokens += 1
        sequence.append(choice.token_id)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        reason = sequence.ending(self.model.eos_token_ids)
        if reason is not None:
            self._drop(sequence)
        return sequence.delta(new=1, logprobs=logprobs, finish_reason=reason)

    def _count_prompt(self, sequence: Sequence) -> None:
        self._prompt_tokens += len(sequence.prompt)
        self._cached_tokens += sequence.cached_tokens
        self._rows_served += sum(
            len(segment) for segment in sequence.prompt.segments if isinstance(segment, Rows)
        )

    def _end(
        self, sequence: Sequence, reason: FinishReason | None = None, *, error: InlayError | None = None
    ) -> Delta:
        self._drop(sequence)
        return sequence.delta(finish_reason=reason, error=error)

    def _drop(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.sampler.forget(sequence)
        del self._sequences[sequence.work.id]


def _finite(rows: Tensor) -> list[bool]:
    """For each row whether all of it is finite."""
    # A sum is not finite if one of them is not, and reads them once; a sum may also overflow, so look again.
    good: list[bool] = torch.isfinite(rows.sum(dim=-1)).tolist()
    return [finite or bool(torch.isfinite(row).all()) for finite, row in zip(good, rows, strict=True)]


__all__ = ["Core"]
