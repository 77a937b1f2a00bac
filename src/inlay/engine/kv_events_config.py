"""`--kv-events-config`: the endpoints on which an engine publishes KV cache events.

Keys and defaults are vLLM's.
"""

import json
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from inlay.base.errors import InvalidRequestError

PARAM = "kv_events_config"

_MOST_PORT = 65535


class KvEventsConfig(BaseModel, frozen=True, extra="forbid"):
    """Publishing settings."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = Field(default=10_000, ge=1)
    hwm: int = Field(default=100_000, ge=1)
    max_queue_size: int = Field(default=100_000, ge=1)
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """True if there is an endpoint to publish on."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, text: str | None, *, ranks: int = 1) -> "KvEventsConfig":
        """Parse the flag's JSON.

        Args:
            text: a JSON object; None for the defaults.
            ranks: number of data-parallel ranks, each with its own ports.

        Raises:
            InvalidRequestError: not such an object, or unusable endpoints.
        """
        try:
            found = cls.model_validate({} if text is None else json.loads(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequestError(f"{PARAM}: {where}: {first['msg']}", param=PARAM) from error
        except ValueError as error:
            raise InvalidRequestError(
                f"{PARAM} must be a JSON object: {error}", param=PARAM
            ) from error
        if found.publishes:
            found.check(ranks)
        return found

    def endpoints(self, rank: int) -> tuple[str, str | None]:
        """Return the publish and replay endpoints of a rank.

        Raises `InvalidRequestError` for an invalid endpoint.
        """
        replay = None if self.replay_endpoint is None else endpoint_of(self.replay_endpoint, rank)
        return endpoint_of(self.endpoint, rank), replay

    def check(self, ranks: int) -> None:
        """Check that `ranks` ranks can use the endpoints without conflicts.

        Raises `InvalidRequestError`.
        """
        taken: dict[str, str] = {}
        for rank in range(ranks):
            for name, address in zip(
                ("endpoint", "replay_endpoint"), self.endpoints(rank), strict=True
            ):
                if address is None or address.endswith(":0"):
                    continue
                if address in taken:
                    raise InvalidRequestError(
                        f"{PARAM}: {name} of rank {rank} is {address}, which is {taken[address]} "
                        "already",
                        param=PARAM,
                    )
                taken[address] = f"the {name} of rank {rank}"


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return a rank's endpoint: TCP ports count up from rank 0's, other names get a suffix.

    As in vLLM.

    Raises:
        InvalidRequestError: not a ZeroMQ endpoint, or a port above the last.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("inproc", "ipc") and rest:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isascii() or not port.isdigit():
        raise InvalidRequestError(
            f"{PARAM}: an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME, got "
            f"{endpoint[:80]!r}",
            param=PARAM,
        )
    number = int(port) and int(port) + rank
    if number > _MOST_PORT:
        raise InvalidRequestError(
            f"{PARAM}: the port of rank {rank} would be {number}; the last is {_MOST_PORT}",
            param=PARAM,
        )
    return f"tcp://{host}:{number}"
