"""`RemoteEncoders`: rows of images from the workers that encode them."""

import asyncio
import logging
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.api import PeerWorkers
from inlay.engine.torch.batch import DEEPSTACK
from inlay.engine.torch.media.tower import ROWS, Arrays
from inlay.media.spec import MediaSpec
from inlay.messages.prompt import Media, Prompt
from inlay.messages.request import PORTS, Payload, Pooling, Request, Task

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0
"""Seconds that one of several encoders may take where the request has no deadline."""

_PORT = PORTS[Task.ENCODE]


class RemoteEncoders:
    """Asks the sources of a request for the rows of its images, one after the other.

    Args:
        peers: reaches other workers.
        spec: of the model's images.
        dtype: of its rows.
        hidden_size: elements of a row.
        last: the last source has all of the time that is left, as nobody encodes here.
    """

    def __init__(
        self, peers: PeerWorkers, spec: MediaSpec, dtype: str, hidden_size: int, *, last: bool
    ) -> None:
        self._peers = peers
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._levels = spec.deepstack
        self._last = last

    async def arrays(self, request: Request, run: Media) -> Arrays:
        """Return the rows of the image that `run` is of.

        Each source has an equal part of the time that is left.

        Args:
            request: whose image it is; its sources are asked.
            run: a run of the image that has its data.

        Raises:
            InvalidRequestError: the file is no picture, or not of the size that it was laid out
                for.
            OverloadedError: no source gave the rows; the message has their reasons.
        """
        asked = Request(
            id=f"{request.id}/{run.digest.hex()}",
            task=Task.ENCODE,
            prompts=(Prompt.of(run),),
            params=Pooling(),
            salt=request.salt,
            priority=request.priority,
            trace=request.trace,
            client=request.client,
        )
        sources = request.peers_of(run.digest)
        clock = asyncio.get_running_loop().time
        until = None if request.deadline is None else clock() + request.deadline
        reasons: list[str] = []
        for place, address in enumerate(sources):
            rest = len(sources) - place - self._last
            if until is not None:
                within: float | None = max(0.0, until - clock()) / (rest + 1)
            else:
                within = PATIENCE_SECONDS if rest else None
            try:
                found = await self._peers.payloads(address, asked, within)
                return self._checked(run, found)
            except InvalidRequestError:
                raise
            except InlayError as error:
                log.warning(
                    "%s:%d gave no rows of an %s: %s",
                    address.host, address.port, run.kind, error.message,
                )  # fmt: skip
                reasons.append(f"{address.host}:{address.port}: {error.message}")
        raise OverloadedError(
            f"no worker encoded an {run.kind} of the prompt ({'; '.join(reasons)})", retry_after=1
        )

    def _checked(self, run: Media, payloads: Sequence[Payload]) -> Arrays:
        """Return the arrays of an answer.

        Raises `EngineError` unless they are what the prompt has room for.
        """
        ports = {_PORT: ROWS}
        ports |= {f"{DEEPSTACK}.{level}": f"{DEEPSTACK}.{level}" for level in range(self._levels)}
        shape, arrays = (run.total, self._hidden_size), {}
        for payload in payloads:
            if payload.port not in ports:
                continue
            if payload.dtype != self._dtype or payload.shape != shape:
                raise EngineError(
                    f"{payload.port} are {payload.dtype} {payload.shape} where the prompt has room "
                    f"for {self._dtype} {shape}"
                )
            arrays[ports[payload.port]] = _array(payload)
        if len(arrays) < len(ports):
            raise EngineError(f"its answer lacks {', '.join(ports.keys() - arrays.keys())}")
        return arrays


def _array(payload: Payload) -> npt.NDArray[np.generic]:
    dtype = np.dtype(ml_dtypes.bfloat16 if payload.dtype == "bfloat16" else payload.dtype)
    try:
        return np.frombuffer(payload.data.view, dtype).reshape(payload.shape)
    except ValueError as error:
        raise EngineError(f"{payload.port} have {len(payload.data)} bytes") from error
