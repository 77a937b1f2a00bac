"""Models by the names that clients know, in the form in which an API lists them."""

from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

from inlay.base.errors import InvalidRequestError
from inlay.http.server import Call, Server
from inlay.messages.card import ModelCard
from inlay.router import Router, ServedModel

Handler: TypeAlias = Callable[[Call], Awaitable[None]]


def listed(router: Router) -> Iterator[tuple[str, ServedModel]]:
    """Yield every model under all its names, then its adapters; no part inside another model.

    Adapters that are of the whole are shown too, once: clients name them, and not the part.
    """
    seen: set[str] = set()
    for card in router.models():
        if card.is_inner and not (card.stage and card.stage.shares_adapters):
            continue
        for name in () if card.is_inner else (card.name, *card.aliases):
            yield name, ServedModel(card)
        for adapter in router.adapters(card):
            if adapter.name in seen:
                continue
            seen.add(adapter.name)
            yield adapter.name, ServedModel(card, adapter)


def by_version(openai: Handler, anthropic: Handler) -> Handler:
    """Return a handler that answers Anthropic's clients, known by a header, in their own form."""

    async def handler(call: Call) -> None:
        # A cache between must not answer one client with the other's form.
        call.added.append((b"vary", b"anthropic-version"))
        if b"anthropic-version" in call.headers:
            await anthropic(call)
            return
        await openai(call)

    return handler


def first_that(server: Server, does: Callable[[ModelCard], bool], said: str) -> ModelCard:
    """Return the first model that clients see and that does something.

    Args:
        server: has the models.
        does: true of such a model.
        said: what it does, for the error: "speaks".

    Raises:
        InvalidRequestError: none does.
        OverloadedError: no worker is ready.
    """
    cards = [card for card in server.router.models() if not card.is_inner]
    if not cards:
        raise server.router.unready()
    found = next((card for card in cards if does(card)), None)
    if found is None:
        raise InvalidRequestError(
            f"model is missing, and none that is served here {said}: "
            + ", ".join(f"`{card.name}`" for card in cards[:_NAMED]),
            param="model",
        )
    return found


_NAMED = 5
"""Names of models at most in an error."""
