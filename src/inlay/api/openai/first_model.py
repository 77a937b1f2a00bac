"""The model that is asked where a request names none."""

from collections.abc import Callable

from inlay.base.errors import InvalidRequestError
from inlay.http.server import Server
from inlay.messages.card import ModelCard


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
