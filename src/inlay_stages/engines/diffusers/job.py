"""One request in the engine: what is done next, and what it has made."""

import asyncio
from collections import deque
from typing import NamedTuple

import torch

from inlay.base.errors import ErrorFrame, InlayError
from inlay.engine.shell import send
from inlay.messages.request import Emit, EngineUsage, FinishReason, Output, Payload, Request
from inlay_stages.engines.diffusers.families.base import DenoiseState
from inlay_stages.params import Diffusion

IMAGE, PREVIEW, LATENTS = "image", "preview", "latents"
"""Ports of what is made: files of images, and latents [images, ...].

Of the way to them, after N steps: "preview.N", "latents.N".
"""


class PreviewLatents(NamedTuple):
    """Latents of one image that wait to be decoded.

    Attributes:
        port: of the file.
        latents: [1, ...].
        last: nothing follows on the port.
        ends: nothing follows at all.
    """

    port: str
    latents: torch.Tensor
    last: bool
    ends: bool


class ImageJob:
    """One request.

    Attributes:
        request: as it was sent.
        params: of the request.
        inputs: by port.
        client: whose it is.
        priority: lower is sooner.
        painting: of its images, from when their noise is drawn.
        sketches: what is to be decoded before anything else.
        makes: port of what is made of the inputs.
        ended: its last output was emitted.
        prompt_tokens: positions of the prompt.
    """

    def __init__(
        self, request: Request, params: Diffusion, inputs: dict[str, Payload], emit: Emit
    ) -> None:
        self.request = request
        self.params = params
        self.inputs = inputs
        self.client = request.client
        self.priority = request.priority
        self.painting: DenoiseState | None = None
        self.sketches: deque[PreviewLatents] = deque()
        self.makes = IMAGE
        self.ended = False
        self.prompt_tokens = 0
        self._emit = emit
        self._entered = asyncio.get_running_loop().time()
        self._waited: float | None = None

    @property
    def cost(self) -> int:
        """Positions that its next step computes; 0: its next work is done alone."""
        painting = self.painting
        if painting is None or self.sketches:
            return 0
        prompts = 1 if painting.negative is None else 2
        return painting.positions * self.params.count * prompts

    def begins(self) -> None:
        """Note that its first work begins."""
        if self._waited is None:
            self._waited = asyncio.get_running_loop().time() - self._entered

    def put(self, *payloads: Payload) -> None:
        """Emit payloads, unless it has ended."""
        if not self.ended:
            self._say(Output(self.request.id, self.request.attempt, 0, payloads=payloads))

    def end(
        self,
        reason: FinishReason,
        *payloads: Payload,
        error: InlayError | None = None,
        positions: int = 0,
    ) -> None:
        """Emit the last output, once; `positions` of the images that were made."""
        if self.ended:
            return
        self.ended = True
        if self.painting is not None:
            self.painting.left = True
        self.painting = None
        self.sketches.clear()
        self._say(
            Output(
                self.request.id,
                self.request.attempt,
                0,
                finish_reason=reason,
                usage=EngineUsage(self.prompt_tokens, positions, 0, self._waited or 0.0),
                error=None if error is None else ErrorFrame.of(error),
                payloads=payloads,
            )
        )

    def _say(self, output: Output) -> None:
        if not send(self.request, self._emit, output):
            self.ended = True
