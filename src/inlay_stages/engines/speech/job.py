"""One request of a talker or a vocoder."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inlay.base.errors import EngineError, ErrorFrame, InlayError
from inlay.engine.shell import send
from inlay.engine.torch.self_check.parts import CheckedPart
from inlay.messages.request import Emit, EngineUsage, FinishReason, Input, Output, Payload, Request
from inlay_stages.params import Speech
from inlay_stages.worker.input_stream import InputStream


class TurnPayloads(NamedTuple):
    """The payloads of one turn of a request.

    Attributes:
        payloads: in their order.
        done: nothing follows.
        limited: because there are as many as are allowed.
        made: codes, or samples of sound.
    """

    payloads: tuple[Payload, ...]
    done: bool
    limited: bool = False
    made: int = 0


class JobProgress(Protocol):
    """The state of a request, which a thread advances."""

    @property
    def ready(self) -> bool:
        """True if it can go on without further inputs."""

    def advance(self, inputs: Sequence[Input], *, ended: bool) -> TurnPayloads:
        """Take inputs and go on by one turn; `ended` says that no others come."""


class Model(Protocol):
    """The part of a model that a stage runs."""

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices."""

    def begin(self, params: Speech) -> JobProgress:
        """Return the state of a request. Raises `InvalidRequestError` if it cannot be served."""

    def probe(self) -> None:
        """Make a little of nothing."""

    def parts(self) -> dict[str, CheckedPart]:
        """Return what is compared with float32 at a start, by name."""


class SpeechJob:
    """One request in the engine.

    Attributes:
        request: as it was sent.
        progress: its state.
        inflow: brings its inputs.
        paused: it waits until what it has made is used.
        ended: its last output was emitted.
        made: codes, or samples of sound.
    """

    def __init__(
        self, request: Request, progress: JobProgress, inflow: InputStream, emit: Emit
    ) -> None:
        self.request = request
        self.progress = progress
        self.inflow = inflow
        self.paused = self.ended = False
        self.made = self.taken = 0
        self._emit = emit

    @property
    def can_go_on(self) -> bool:
        """True if there is something to do for it now."""
        return not (self.paused or self.ended) and (self.progress.ready or self.inflow.has_news)

    def take(self) -> list[Input]:
        """Return inputs, if it cannot go on without. Raises the error that they ended with."""
        if self.progress.ready:
            return []
        found = self.inflow.take()
        self.taken += sum(given.value.shape[0] for given in found)
        if not found and self.inflow.error is not None:
            raise self.inflow.error
        return found

    def put(self, piece: TurnPayloads) -> None:
        """Emit what a turn has made, and the end, if that is it."""
        self.made += piece.made
        if piece.done:
            self.end("length" if piece.limited else "stop", payloads=piece.payloads)
        elif piece.payloads and not self.ended:
            request = self.request
            self._emit(Output(request.id, request.attempt, 0, payloads=piece.payloads))

    def end(
        self,
        reason: FinishReason,
        *,
        error: InlayError | None = None,
        payloads: tuple[Payload, ...] = (),
    ) -> None:
        """Emit the last output, once."""
        if self.ended:
            return
        self.ended = True
        output = Output(
            self.request.id,
            self.request.attempt,
            0,
            finish_reason=reason,
            usage=EngineUsage(self.taken, self.made),
            error=None if error is None else ErrorFrame.of(error),
            payloads=payloads,
        )
        send(self.request, self._emit, output)


def tensor_of(payload: Payload) -> Tensor:
    """Return a payload as a tensor. Raises `EngineError` if it is none."""
    dtype = getattr(torch, payload.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"the payload {payload.port} is of type {payload.dtype!r}")
    if not len(payload.data):
        return torch.zeros(payload.shape, dtype=dtype)
    # A copy: the memory may be used for another message.
    return torch.frombuffer(bytearray(payload.data.view), dtype=dtype).reshape(payload.shape)
