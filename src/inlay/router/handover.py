"""Handover of a request: its prompt is computed at one worker, its output made at another.

The first worker is sent the request for one token. The next is asked to fetch the prompt's pages
from it as they are computed, and then goes on as after the loss of a worker.

Workers whose card says `kv_tickets` know pages by a ticket alone. There the first token is not
shown: the next worker makes all of the output, so that nothing of it depends on where it began.
"""

from msgspec.structs import replace

from inlay.card import Address, ModelCard
from inlay.request import PAGES, PORTS, Output, Request, Sampling, Source, Task
from inlay.resuming import inexact
from inlay.router.load_reservation import LoadReservation
from inlay.transport.api import Stream, Worker


class Handover:
    """A place at the worker that goes on with a request.

    Args:
        worker: that goes on.
        load: the request's part of its load, until it is sent there.
        prefetch: of the prompt's pages there, or None.

    Attributes:
        ticket: for the pages, once the prefill worker has given it; empty where it gives none.
    """

    def __init__(
        self, worker: Worker, load: LoadReservation, prefetch: Stream | None = None
    ) -> None:
        self.worker = worker
        self.ticket = b""
        self._load = load
        self._prefetch = prefetch

    def take(self, output: Output) -> Output:
        """Return the part of a prefill worker's output that is shown."""
        if not self.worker.card.kv_tickets:
            return output
        for payload in output.payloads:
            if payload.port == PORTS[Task.GENERATE]:
                self.ticket = bytes(payload.data.view)
        return replace(output, offset=0, token_ids=(), logprobs=(), payloads=())

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
    if (
        sampling.max_tokens <= 1
        or request.prior_output
        # These are made where the prompt is computed, all of it.
        or sampling.prompt_logprobs is not None
        or sampling.hidden_states is not None
    ):
        return False
    if card.kv_tickets:
        # Nobody has compared images and the like that travel so.
        return not request.prompt.has_rows or card.media is None
    return not inexact(request, card)


def first_part(request: Request, card: ModelCard) -> Request:
    """Return the request for the prompt and the first token, to a worker with this card."""
    if card.kv_tickets:
        only_prompt = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        return replace(request, params=only_prompt, gives_ticket=True)
    return replace(request, params=replace(request.sampling, max_tokens=1))


def prefetch_of(request: Request, address: Address) -> Request:
    """Return the request that brings the pages of a prompt while they are computed at `address`."""
    return replace(
        request,
        params=replace(request.sampling, max_tokens=1),
        id=f"{request.id}/prefetch",
        sources=(Source(PAGES, (address,)),),
        trace=None,
        prefetch=True,
    )
