"""`TokenSampler`: the tokens that a launched step gives."""

import time
from collections.abc import Iterable

from inlay.base.errors import InlayError
from inlay.engine.torch.grammar import masks
from inlay.engine.torch.in_flight_step import InFlightStep, TokenRun
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.sampling.chooser import TokenChooser
from inlay.engine.torch.scheduler import Scheduler
from inlay.engine.torch.speculation import Speculator


class TokenSampler:
    """Samples the next tokens of a step, and appends them to their sequences.

    Args:
        chooser: samples.
        scheduler: of the step.
        model: that computed it.
        speculator: that drafted tokens, or None.
    """

    def __init__(
        self,
        chooser: TokenChooser,
        scheduler: Scheduler,
        model: CausalModel,
        speculator: Speculator | None,
    ) -> None:
        self._chooser = chooser
        self._scheduler = scheduler
        self._model = model
        self._speculator = speculator

    def draw(self, flight: InFlightStep) -> None:
        """Sample the token after the known positions of each chunk; it is not read.

        All earlier tokens must be known.
        """
        going = [
            chunk
            for chunk in flight.sampling
            if not chunk.sequence.ended
            and len(chunk.sequence.output) < chunk.sequence.sampling.max_tokens
        ]
        chosen = self._chooser.choose(flight.logits_of(going, 0), going)
        flight.choose(chosen)
        for chunk in chosen.late:
            # Its last position is computed again later, for its logits.
            self._scheduler.unschedule_last(chunk)
        if self._model.recurrent and not flight.has_drafts:
            self._model.commit_recurrent_state(flight.num_confirmed({}))

    def sample(self, flight: InFlightStep) -> list[TokenRun]:
        """Return the tokens of each chunk of a sequence that has not ended. Waits for the device.

        A run of tokens goes on as long as each is the draft after it: the next is sampled as in a
        step of its own, with all before it known.
        """
        if flight.chosen is None:
            self.draw(flight)
        runs = flight.read()
        for run in runs:
            if run.tokens:
                run.chunk.sequence.append(run.tokens[0].token_id)
        if flight.has_drafts:
            drafted = [run for run in runs if run.chunk.drafts and run.finite]
            self._verify(flight, drafted)
            accepted = {run.chunk: run.accepted for run in drafted}
            if self._speculator is not None:
                self._speculator.learn(accepted)
            if self._model.recurrent:
                self._model.commit_recurrent_state(flight.num_confirmed(accepted))
        return runs

    def _verify(self, flight: InFlightStep, runs: Iterable[TokenRun]) -> None:
        """Sample after the drafts that are what was sampled before them."""
        until, place = time.monotonic() + masks.GRACE, 0
        while going := [run for run in runs if self._goes_on(run, place)]:
            place += 1
            chunks = [run.chunk for run in going]
            choices = self._chooser.choose(flight.logits_of(chunks, place), chunks, until).read()
            for run in going:
                choice = choices.get(run.chunk)
                if isinstance(choice, InlayError):
                    run.error = choice
                elif choice is not None:
                    run.tokens.append(choice)
                    run.chunk.sequence.append(choice.token_id)

    def _goes_on(self, run: TokenRun, place: int) -> bool:
        """True if the last token of a run is the draft at `place`, and not the end."""
        if len(run.tokens) != place + 1 or run.error is not None:
            return False
        if run.chunk.drafts[place : place + 1] != (run.tokens[-1].token_id,):
            return False
        return run.chunk.sequence.finish_reason(self._model.eos_token_ids) is None
