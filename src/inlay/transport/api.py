"""Protocols of a transport: planes, workers and streams."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar, runtime_checkable

from inlay.messages.card import ModelCard
from inlay.messages.commands import LoadAdapter, WorkerCommand
from inlay.messages.request import Emit, Output, Request
from inlay.transport.buffer_offers import BufferPlace, ReplyBuffer

Heard_co = TypeVar("Heard_co", covariant=True)
R = TypeVar("R")


class FrameTransport(Protocol[Heard_co]):
    """A connection that carries messages.

    `LocalTransport` on a machine, `inlay.transport.Connection` between machines.
    """

    def send(self, message: object) -> Any:
        """Send a message without waiting; return what `release` and `withdraw` take."""

    def release(self, sent: Any) -> None:
        """Free what a message occupies here, as the other end reads it no more."""

    def withdraw(self, sent: Any) -> bool:
        """Stop sending a message; False when it has left."""

    def when_left(self, sent: Any, call: Callable[[], None]) -> bool:
        """Call `call` when a message has left that later ones may overtake; False if none may."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of messages that wait to leave, but for large ones, which give way to others."""

    def room(self, num_bytes: int) -> memoryview | None:
        """Return memory of which a buffer in a message is not copied; None where there is none."""

    def reserve_reply(self, num_bytes: int) -> ReplyBuffer | None:
        """Return memory that the other end may make an answer in; None where there is none."""

    def reply_memory(self, place: BufferPlace) -> memoryview:
        """Return memory that the other end has lent. Raises `ValueError` if it cannot have."""

    async def receive(self) -> Heard_co:
        """Return the next message. Raises `EOFError` when the other end is gone."""

    async def deliver(self, take: Callable[[Heard_co], None]) -> NoReturn:
        """Have `take` called with each message from here on.

        Raises:
            EOFError: the other end is gone.
            Exception: what `take` raised; it is called no more.
        """

    def close(self) -> None:
        """Close the connection. What was sent still leaves."""


class Stream(Protocol):
    """One request under way, as the frontend sees it."""

    def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        """Outputs as they come, all that have arrived at a time.

        Ends after the one with a finish reason.

        Raises:
            OverloadedError: the worker is gone; the request may be sent again elsewhere.
            InvalidRequestError: the worker refused the request.
        """

    def cancel(self) -> None:
        """Stop the request; needs no answer. Safe to call again and after the end."""


class Worker(Protocol):
    """A worker a plane knows, ready for work."""

    @property
    def id(self) -> str:
        """Unique in the plane, never used again."""

    @property
    def card(self) -> ModelCard:
        """Its last card."""

    def send(self, request: Request) -> Stream:
        """Send a request. Rows go as raw buffers.

        Requests whose prompts share memory share it on the way where the plane can.
        """

    async def call(self, command: WorkerCommand[R], within: float = 30.0) -> R:
        """Run an admin command.

        Raises:
            OverloadedError: the worker is gone.
            DeadlineExceededError: it did not answer within `within` seconds.
            InlayError: it could not follow the command.
        """


class Plane(Protocol):
    """Carries requests to workers and outputs back. The frontend's side."""

    async def start(self) -> None:
        """Connect, and begin to learn of workers."""

    async def close(self) -> None:
        """Cancel what is under way and disconnect."""

    def workers(self) -> Sequence[Worker]:
        """The workers that are ready now."""

    def unavailable(self) -> Mapping[str, str]:
        """The workers that should be there and are not ready, by whatever name, and why."""

    async def changed(self) -> None:
        """Return at the next change of the set of ready workers or of a card. Any number may wait.

        Nothing is missed by `while not condition(): await plane.changed()`.
        """

    def room(self, num_bytes: int) -> memoryview | None:
        """Writable memory whose bytes are not copied on their way, or None where there is none.

        It is free again once neither a view of it nor a request that was sent with one is left.
        """


class RequestHandler(Protocol):
    """The worker's side of a connection: `inlay.worker` implements it around an engine."""

    def watch(self, announce: Callable[[ModelCard], None]) -> Callable[[], None]:
        """Call `announce` with the card, now and at each change, until the result is called."""

    def submit(self, request: Request, emit: Emit) -> None:
        """As `Engine.submit`, but what is refused ends with an error output."""

    def abort(self, request_id: str) -> None: ...

    async def call(self, command: WorkerCommand[R]) -> R:
        """Run a command. Raises `InlayError` if it fails."""

    def forget_prompt(self, key: str | None) -> None:
        """Drop the copy of a stored prompt that was deleted; of every one for None."""


@runtime_checkable
class Silences(Protocol):
    """A worker of which nobody else says that its process stands still."""

    def silence(self) -> float:
        """Return the seconds of `inlay.base.liveness` for which it has owed an answer."""


@runtime_checkable
class Reaches(Protocol):
    """A plane whose workers may all be out of reach for a while, though they are there."""

    def unreachable(self) -> str | None:
        """Say why nothing reaches any worker now, or None."""


Loss: TypeAlias = Literal["silent", "restarted"]
"""Way in which a worker was lost: no sign of life came any more; its engine's process ended."""


@runtime_checkable
class CountsLosses(Protocol):
    """A plane that counts the workers that went without saying so."""

    def losses(self) -> Mapping[tuple[str, Loss], int]:
        """Return the workers lost so far, by model."""


@runtime_checkable
class Announces(Protocol):
    """A plane that knows of ready workers by what all frontends hear, reached from here or not."""

    def announced(self) -> Sequence[ModelCard]:
        """Their cards; the same object until that has changed."""


@runtime_checkable
class Drains(Protocol):
    """A plane whose workers are processes that end by themselves once they have drained."""

    async def drain(self, worker_id: str) -> None:
        """Have a worker drain and end, as with SIGTERM; return when it takes no more requests.

        Raises:
            NotFoundError: no such worker is ready.
            DeadlineExceededError: it did not say in time that it drains.
        """


@runtime_checkable
class RecordsAdapters(Protocol):
    """A plane whose workers load, when they come, what has been recorded for their model.

    Both raise `OverloadedError` when nothing can be recorded now, and `InvalidRequestError` if what
    is there is not understood.
    """

    async def record_adapter(self, model: str, order: LoadAdapter) -> None:
        """Have workers of a model that come later load an adapter from where `order` says."""

    async def forget_adapter(self, models: Iterable[str], name: str) -> bool:
        """Have workers that come later not load it any more; True if it was recorded."""
