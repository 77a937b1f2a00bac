"""Handover of a request: its prompt is computed at one worker, its output made at another.

The first worker is sent the request for one token. The next is asked to fetch the prompt's pages
from it as they are computed, and then goes on as after the loss of a worker.
"""

from msgspec.structs import replace

from inlay.card import Address, ModelCard
from inlay.request import PAGES, Request, Source, Task
from inlay.resuming import inexact
from inlay.router.load_reservation import LoadReservation
from inlay.transport.api import Stream, Worker


class Handover:
    """A place at the worker that goes on with a request.

    Args:
        worker: that goes on.
        load: the request's part of its load, until it is sent there.
        prefetch: of the prompt's pages there, or None.
    """

    def __init__(
        self, worker: Worker, load: LoadReservation, prefetch: Stream | None = None
    ) -> None:
        self.worker = worker
        self._load = load
        self._prefetch = prefetch

    def end(self) -> None:
        """Free the place; the prefetch goes on. May be called again."""
        self._load.end()

    def cancel(self) -> None:
        """Free the place and stop the prefetch. May be called again."""
        self._load.end()
        if self._prefetch is not None:
            self._prefetch.cancel()


def is_divisible(request: Request, card: ModelCard) -> bool:
    """True if a request may be handed over after its first token at workers with this card."""
    if request.task is not Task.GENERATE or request.inputs or request.hold:
        return False
    sampling = request.sampling
    return (
        sampling.max_tokens > 1
        and not request.prior_output
        # These are made where the prompt is computed, all of it.
        and sampling.prompt_logprobs is None
        and sampling.hidden_states is None
        and not inexact(request, card)
    )


def first_part(request: Request) -> Request:
    """Return the request for the prompt and the first token."""
    return replace(request, params=replace(request.sampling, max_tokens=1))


def prefetch_of(request: Request, address: Address) -> Request:
    """Return the request that brings the pages of a prompt while they are computed at `address`."""
    return replace(
        first_part(request),
        id=f"{request.id}/prefetch",
        sources=(Source(PAGES, (address,)),),
        trace=None,
        prefetch=True,
    )


__all__ = ["Handover", "first_part", "is_divisible", "prefetch_of"]
