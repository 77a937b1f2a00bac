"""A request's prompt is computed at one worker, its output made at another.

In a *handover* the first worker is sent the request for one token. The next is asked to fetch the
prompt's pages from it as they are computed, and then goes on as after the loss of a worker.

Workers whose card says `kv_tickets` know pages by a ticket alone. There the first token is not
shown: the next worker makes all of the output, so that nothing of it depends on where it began.

Workers whose card says `kv_rooms` do one phase alone, and have a request two at a time: they meet
in a *room*.
"""

from collections.abc import Sequence
from secrets import randbelow

from msgspec.structs import replace

from inlay.base.address import KvRoom
from inlay.base.errors import EngineError
from inlay.messages.card import Address, ModelCard
from inlay.messages.request import PAGES, Request, Sampling, Source, Task
from inlay.messages.resuming import non_resumable_features
from inlay.transport.api import Worker

_MOST_ROOMS = 2**63 - 1


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
    return not non_resumable_features(request, card)


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


def with_partners(workers: Sequence[Worker]) -> list[Worker]:
    """Return those of some workers that can take a whole request, alone or with one of them."""
    there = {(one.card.kv_rooms, one.card.phase) for one in workers}
    return [
        one
        for one in workers
        if not one.card.kv_rooms
        or {(one.card.kv_rooms, phase) for phase in ("prefill", "decode")} <= there
    ]


def room_at(card: ModelCard) -> KvRoom:
    """Return a new room at the prefill worker with this card.

    Raises:
        EngineError: its card does not say where it is found.
    """
    if card.bootstrap is None:
        raise EngineError("a prefill worker's card does not say where decode workers find it")
    return KvRoom(*card.bootstrap, 1 + randbelow(_MOST_ROOMS))


def prompt_part(request: Request) -> Request:
    """Return the part of a request in a room that its prefill worker has: prompt and first token.

    The decode worker takes that token as its own, so it is drawn with the request's parameters. It
    has an id of its own: the prompt of the attempt before may not have ended there yet.
    """
    sampling: Sampling = request.sampling
    most = min(sampling.max_tokens, len(request.prior_output) + 1)
    id_ = f"{request.id}/prompt-{request.attempt}"
    return replace(request, id=id_, params=replace(sampling, max_tokens=most))
