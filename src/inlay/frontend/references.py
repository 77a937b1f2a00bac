"""References to stored prompts in requests."""

import asyncio
from collections.abc import Sequence
from typing import Any

from inlay.card import ModelCard
from inlay.errors import InvalidRequestError, NotFoundError
from inlay.frontend.bodies.embeds import Embeddings
from inlay.frontend.bodies.sources import TensorSource, check_source
from inlay.frontend.parsed_request import ParsedRequest
from inlay.frontend.server import Call
from inlay.prompt import Rows
from inlay.store import StoredPrompt, StoredPrompts
from inlay.tensors.tensor import quoted

SWEEP_SECONDS = 10.0
"""Interval at which expired prompts are removed from the store."""


def store_for(call: Call) -> StoredPrompts:
    """Return the store of uploaded embeddings.

    Raises:
        InvalidRequestError: this server accepts no embeddings.
        NotFoundError: this server has no store.
    """
    server = call.server
    server.embeds.require_enabled()
    if server.store is None:
        raise NotFoundError("prompt_embeds not found: this server stores none")
    return server.store


async def embeddings_of(
    call: Call, incoming: ParsedRequest[Any], sources: Sequence[TensorSource], card: ModelCard
) -> Embeddings:
    """Return the embeddings of a request.

    Args:
        call: the HTTP request.
        incoming: the parsed request.
        sources: sources of embeddings that the request names.
        card: of the model.

    Raises:
        InvalidRequestError: the body has a part that the request does not name.
        InlayError: as `stored_rows`.
    """
    limits, parts = call.server.embeds.limits, incoming.parts
    unused = sorted(set(parts or ()) - {source.part for source in sources})
    if unused:
        raise InvalidRequestError(
            f"the request does not use part {quoted(unused[0])} of its body", param=unused[0][:80]
        )
    stored = await stored_rows(call, sources, card)
    parsed = incoming.parsed
    return Embeddings(
        call.server.embeds,
        card,
        lambda text: parsed.data(text, limits=limits),
        hold=call.reservation.grow,
        parts=parts,
        stored=stored,
    )


async def stored_rows(
    call: Call, sources: Sequence[TensorSource], card: ModelCard
) -> dict[str, tuple[Rows, ...]]:
    """Return the rows of every reference among `sources`, by id.

    Rows that this model has used before are looked up, not computed again.

    Args:
        call: the HTTP request.
        sources: sources of embeddings that the request names.
        card: of the model.

    Raises:
        EmbeddingsError: not acceptable for the model.
        InvalidRequestError: a source that is not exactly one string.
        NotFoundError: no such stored prompt, or not the caller's.
        BodyTooLargeError: they are over the limit of one request.
        OverloadedError: reading them would exceed the memory budget.
    """
    wanted: dict[str, str] = {}
    for source in sources:
        check_source(source)
        if isinstance(source.ref, str):
            wanted.setdefault(source.ref, source.param)
    if not wanted:
        return {}
    store, target, tenant = store_for(call), call.server.embeds.target(card), call.tenant.id

    def look(stored: StoredPrompt) -> None:
        call.memory.check_total([stored.bytes])

    found: dict[str, tuple[Rows, ...]] = {}
    for ref, param in wanted.items():
        try:
            found[ref] = await store.rows(
                tenant, ref, target, look=look, hold=call.reservation.grow
            )
        except NotFoundError as error:
            raise NotFoundError(error.message, param=param) from error
    return found


async def sweep(store: StoredPrompts) -> None:
    """Remove expired prompts at intervals, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        await store.sweep()
