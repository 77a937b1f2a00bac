"""The last two stages of a step: its results are committed, then emitted."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Run

from msgspec import structs

from inlay.base.errors import EmbeddingsError, EngineError, InlayError
from inlay.engine.torch.in_flight_step import TokenRun
from inlay.engine.torch.plan import Totals
from inlay.engine.torch.sampling.sampler import SampledToken
from inlay.engine.torch.scheduler import Scheduler
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Rows
from inlay.messages.request import Output, Payload, TokenLogprobs


class Committer:
    """Names the pages that good chunks filled, and has those of bad ones scrubbed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def commit(self, runs: Iterable[TokenRun]) -> None:
        """Commit the chunks whose results are finite; the others' sequences are to be ended."""
        bad = []
        for run in runs:
            chunk = run.chunk
            if not run.finite:
                bad.append(chunk)
                continue
            if chunk.drafts:
                chunk = self._scheduler.accept_drafts(chunk, run.accepted)
            # First, as committing frees the pages that a window has passed.
            self._scheduler.mark_verified(chunk)
            self._scheduler.commit(chunk, unscheduled=run.unscheduled)
        for chunk in bad:
            self._scheduler.invalidate(chunk)


class Emitter:
    """Makes outputs, and ends sequences.

    Args:
        eos_token_ids: of the model.
        totals: counts prompts and tokens.
        expect: called with a sequence whose next token is not planned yet, or None.
        end: called with each sequence that has ended, before its last output is made.
    """

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        totals: Totals,
        expect: Callable[[Sequence], object] | None,
        end: Callable[[Sequence], object],
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._totals = totals
        self._expect = expect
        self._end = end

    def emit(self, runs: Iterable[TokenRun]) -> list[Output]:
        """Return the outputs of a step whose tokens are appended."""
        outputs: list[Output] = []
        for run in runs:
            sequence, tokens, error = run.chunk.sequence, run.tokens, run.error
            payloads: tuple[Payload, ...] = ()
            if not run.finite:
                error = _not_finite(sequence)
            elif run.states is not None:
                payloads = run.states.states_for(sequence)
            if run.finite and (run.scores or (payloads and not tokens and error is None)):
                outputs.append(self._emit_prompt(run, payloads))
                payloads = ()
            if tokens:
                outputs.append(self._emit_tokens(sequence, tokens, payloads))
            if error is not None:
                outputs.append(self.fail(sequence, error))
        return outputs

    def fail(self, sequence: Sequence, error: InlayError) -> Output:
        """End a sequence with `error`."""
        self._end(sequence)
        return sequence.make_output(error=error)

    def _emit_prompt(self, run: TokenRun, payloads: tuple[Payload, ...]) -> Output:
        """Emit logprobs and hidden states of a prompt; the end, if nothing else was requested."""
        sequence, untold = run.chunk.sequence, len(run.tokens)
        sequence.scored += 0 if run.scores is None else len(run.scores)
        reason = None if untold else sequence.finish_reason(self._eos_token_ids)
        if reason is not None:
            self._totals.add_prompt(sequence)
            self._end(sequence)
        return sequence.make_output(
            untold=untold, prompt_logprobs=run.scores, payloads=payloads, finish_reason=reason
        )

    def _emit_tokens(
        self, sequence: Sequence, tokens: Run[SampledToken], payloads: tuple[Payload, ...]
    ) -> Output:
        """Emit appended tokens; the end, if the last of them ends the output."""
        if len(sequence.output) - len(tokens) == len(sequence.request.prior_output):
            self._totals.add_prompt(sequence)
        self._totals.generated_tokens += len(tokens)
        reason = sequence.finish_reason(self._eos_token_ids)
        if reason is not None:
            self._end(sequence)
            payloads = tuple(structs.replace(payload, last=True) for payload in payloads)
        elif self._expect is not None:
            # What the grammar forces is to be known when the next step is planned.
            self._expect(sequence)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.sampling.logprobs is not None:
            logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
        return sequence.make_output(
            new=len(tokens), logprobs=logprobs, finish_reason=reason, payloads=payloads
        )


def _not_finite(sequence: Sequence) -> InlayError:
    if any(isinstance(segment, Rows) for segment in sequence.prompt.segments):
        return EmbeddingsError("the model's output for these embeddings is not finite")
    return EngineError("the model's output is not finite")
