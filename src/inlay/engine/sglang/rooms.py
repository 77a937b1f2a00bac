"""Halves of a request: an SGLang that computes prompts alone, or makes tokens alone.

SGLang's prefill and decode servers get a request at the same time and meet in a room that its
sender names: a decode server asks the prefill server's bootstrap server where the keys and values
are, and makes all tokens but the first. SGLang believes whatever room it is told, so inlay alone
names them. No SGLang here.
"""

import socket
from collections.abc import Iterator
from typing import Any

from inlay.base.errors import KV_LOST, InvalidRequestError, OverloadedError
from inlay.engine.ports import free_port
from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard
from inlay.messages.priority import FIRST
from inlay.messages.request import Request

FAKE_HOST = "2.2.2.2"
"""SGLang's `FAKE_BOOTSTRAP_HOST`: such a request takes or gives no keys and values."""
_MODE = "--disaggregation-mode"
_PORT = "--disaggregation-bootstrap-port"
_BACKUP = "--disaggregation-decode-retraction-backup"
_BACKEND = "--disaggregation-transfer-backend"


def check(settings: EngineSettings) -> None:
    """Raise `InvalidRequestError` where SGLang could not be half of a pair, or only by half."""
    values = _values(settings.library.engine_arguments)
    if _MODE in values:
        raise InvalidRequestError(
            f"{_MODE} is given to SGLang: say --role, which routers must know", param="role"
        )
    if settings.kv.role == "both":
        return
    if settings.model.task not in ("auto", "generate"):
        raise InvalidRequestError(
            f"--role {settings.kv.role} is for models that generate, not for --task "
            f"{settings.model.task}",
            param="role",
        )
    if values.get(_BACKEND) == "fake":
        raise InvalidRequestError(
            f"{_BACKEND} fake moves no keys and values: answers would have nothing to do with "
            "prompts",
            param="role",
        )
    if "--enable-pd-role-switch" in values:
        raise InvalidRequestError(
            "--enable-pd-role-switch changes a role that routers take for fixed", param="role"
        )


def words(settings: EngineSettings, host: str) -> Iterator[str]:
    """SGLang's arguments for the role of a worker that others reach at `host`, an IP address."""
    if settings.kv.role == "both":
        return
    given = _values(settings.library.engine_arguments)
    yield from (_MODE, settings.kv.role)
    if _BACKEND not in given:
        # Needs no special network: it goes over TCP where there is none.
        yield from (_BACKEND, "nixl")
    if settings.kv.role == "prefill":
        if "--host" not in given:
            yield from ("--host", host)
        if _PORT not in given:
            yield from (_PORT, str(free_port(host)))
    if settings.model.device != "cpu":
        return
    # Its defaults wait for a GPU's events, and pin memory for one.
    yield "--disable-overlap-schedule"
    if settings.kv.role == "decode" and _BACKUP not in given:
        yield from (_BACKUP, "cpu_tensor")


def address_of(host: str) -> str:
    """Return an IP address of this machine by its name: SGLang listens on addresses alone."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def form(version: str, arguments: Any, dtype: str) -> str:
    """`ModelCard.kv_rooms` of an SGLang: equal where keys and values go from one to the other.

    Args:
        version: of SGLang.
        arguments: its `ServerArgs`, resolved.
        dtype: of the model.
    """
    return (
        f"sglang-{version}/{arguments.disaggregation_transfer_backend}/"
        f"page-{arguments.page_size}/{dtype}/{arguments.kv_cache_dtype}/tp-{arguments.tp_size}/"
        f"pp-{arguments.pp_size}/drafts-{arguments.speculative_algorithm}"
    )


def checked(request: Request, card: ModelCard) -> dict[str, Any]:
    """Return SGLang's fields for the room of a request.

    Raises:
        OverloadedError: the worker cannot do its part of it; another may.
    """
    room = request.kv_room
    if not card.kv_rooms:
        return {}
    if room is None and request.priority <= FIRST:  # a probe
        return {"bootstrap_host": FAKE_HOST, "bootstrap_room": 0}
    if (
        room is None
        or room.host == FAKE_HOST
        or not (0 < room.number < 2**63 and 0 < room.port < 2**16)
        or (card.bootstrap is not None and (room.host, room.port) != tuple(card.bootstrap))
    ):
        raise OverloadedError(
            f"this worker does the {card.phase} part of a request alone, and the request names no "
            "room where it could",
            retry_after=1,
        )
    return {
        "bootstrap_host": room.host,
        "bootstrap_port": room.port,
        "bootstrap_room": room.number,
    }


def lost(why: object) -> OverloadedError:
    """Return the error of a request whose keys and values did not arrive."""
    return OverloadedError(
        f"the prompt's keys and values did not come: {why}", retry_after=1, reason=KV_LOST
    )


def _values(given: list[str]) -> dict[str, str]:
    """Flags among SGLang's arguments and what stands behind each."""
    found: dict[str, str] = {}
    for word, behind in zip(given, [*given, ""][1:], strict=True):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = value if equals else behind
    return found
