"""Requests of engines that make payloads."""

from dataclasses import dataclass

from inlay.base.errors import EngineError, InlayError
from inlay.messages.request import FinishReason, Request, Task
from inlay_stages.engines.jobs import EngineJobs
from inlay_stages.params import Diffusion


@dataclass(eq=False)
class Work:
    request: Request
    ended: FinishReason | None = None

    def end(self, reason: FinishReason, *, error: InlayError | None = None) -> None:
        self.ended = self.ended or reason


async def test_an_attempt_that_has_ended_takes_no_further_one_with_it() -> None:
    jobs: EngineJobs[Work] = EngineJobs(4, "it was made")
    params = Diffusion(width=8, height=8, steps=1)
    first, second = (
        Work(Request(id="r", attempt=attempt, task=Task.STAGE, prompts=(), params=params))
        for attempt in (0, 1)
    )
    jobs.shell.add(first)
    jobs.shell.abort("r")
    jobs.shell.add(second)
    jobs.enqueue(second)
    # What was computed for the first one fails only now.
    jobs.shell.end(first, "error", EngineError("no"))
    assert jobs.shell.get("r") is second
    assert second in jobs.queue
    assert (first.ended, second.ended) == ("abort", None)
