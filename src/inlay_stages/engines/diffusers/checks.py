"""Checks of a request before it costs anything, and of values on the engine's thread."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.messages.prompt import DTYPE_SIZES
from inlay.messages.request import Payload, Request
from inlay.tensors.tensor import NUMPY_DTYPES
from inlay_stages.cards import check_image_cost
from inlay_stages.engines.diffusers.facts import Facts
from inlay_stages.engines.diffusers.image_pipeline import EMBEDS, NEGATIVE
from inlay_stages.engines.diffusers.loading import Part
from inlay_stages.params import Diffusion

MAX_SIDE = 8192
"""Pixels of a side at most."""
MAX_COUNT = 10
"""Images of one request at most, as OpenAI's."""
MAX_GUIDANCE = 100.0
_DTYPES = ("float32", "float16", "bfloat16", "float64")
MAX_PROMPT_BYTES = 128 * 1024
"""Bytes of a prompt's text: OpenAI's 32,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBounds:
    """Bounds of one request.

    Attributes:
        facts: of the pipeline.
        part: that is served.
        max_pixels: of one image.
        max_cost: pixels of one image times its steps.
        max_steps: of the denoiser.
        max_abs: of an element of the embeddings.
    """

    facts: Facts
    part: Part
    max_pixels: int
    max_cost: int
    max_steps: int
    max_abs: float

    def check(self, params: Diffusion, inputs: Mapping[str, Payload]) -> None:
        """Raise `InvalidRequestError` if parameters or inputs cannot be served here."""
        self._check_size(params)
        facts = self.facts
        _check_range("num_inference_steps", params.steps, 1, self.max_steps)
        own = facts.width, facts.height
        check_image_cost(params.width, params.height, params.steps, own=own, most=self.max_cost)
        _check_range("n", params.count, 1, MAX_COUNT)
        _check_range("guidance_scale", params.guidance, 0, MAX_GUIDANCE)
        _check_range("preview_every", params.preview_every, 0, self.max_steps)
        _check_range("seed", params.seed, -(2**63), 2**64 - 1)
        if params.negative is not None:
            if not facts.negative:
                raise InvalidRequestError(
                    "this model takes no negative prompt", param="negative_prompt"
                )
            _check_text(params.negative.encode(), "negative_prompt")
        self._check_inputs(params, inputs)

    def _check_size(self, params: Diffusion) -> None:
        width, height, multiple = params.width, params.height, self.facts.multiple
        if not (
            all(multiple <= side <= MAX_SIDE and side % multiple == 0 for side in (width, height))
            and width * height <= self.max_pixels
        ):
            raise InvalidRequestError(
                f"size is {width}x{height}; sides are multiples of {multiple}, from {multiple} to "
                f"{MAX_SIDE}, with at most {self.max_pixels} pixels (--max-generated-image-size)",
                param="size",
            )

    def _check_inputs(self, params: Diffusion, inputs: Mapping[str, Payload]) -> None:
        if self.part == "vae":
            self._check_ports(inputs, ["latents"])
            shape = (params.count, *self.facts.latent_shape(params.width, params.height))
            _check_tensor(inputs["latents"], shape)
            return
        positive = {EMBEDS + name: shape for name, shape in self.facts.embeds.items()}
        negative = {EMBEDS + NEGATIVE + name: shape for name, shape in self.facts.embeds.items()}
        has_negative = self.facts.negative and any(port in inputs for port in negative)
        given = negative if has_negative else {}
        if self.part != "denoiser" and not any(port in inputs for port in positive):
            self._check_ports(inputs, ["prompt", *given])
            _check_text(bytes(inputs["prompt"].data.view), "prompt")
        else:
            given = positive | given
            self._check_ports(inputs, [*given])
        for port, shape in given.items():
            self._check_embeds(inputs[port], shape)
        self._check_pair(params, inputs, has_negative=has_negative)

    def _check_embeds(self, found: Payload, shape: tuple[int, ...]) -> None:
        if len(found.shape) == len(shape):
            length = found.shape[0]
            if shape[0] == -1 and not 1 <= length <= self.facts.max_length:
                raise EmbeddingsError(
                    f"{found.port.removeprefix(EMBEDS)} has {length} positions; this model reads "
                    f"1 to {self.facts.max_length}",
                    reason="shape",
                )
            shape = tuple(
                actual if size == -1 else size
                for size, actual in zip(shape, found.shape, strict=True)
            )
        _check_tensor(found, shape)

    def _check_pair(
        self, params: Diffusion, inputs: Mapping[str, Payload], *, has_negative: bool
    ) -> None:
        """Raise if a prompt and the negative prompt that takes part do not go together."""
        facts = self.facts
        given = has_negative or params.negative is not None
        if not facts.guides(params.guidance, negative=given):
            return
        if self.part == "denoiser" and not has_negative:
            raise InvalidRequestError(
                f"guidance of {params.guidance:g} needs the embeddings of a negative prompt",
                param="guidance_scale",
            )
        lengths = [
            inputs[port].shape[0] if port in inputs else facts.max_length
            for port in (f"{EMBEDS}prompt_embeds", f"{EMBEDS}{NEGATIVE}prompt_embeds")
        ]
        if facts.padded and lengths[0] != lengths[1]:
            raise EmbeddingsError(
                f"the prompt has {lengths[0]} positions and the negative prompt {lengths[1]}; this "
                f"model takes equal numbers, and its text encoder makes {facts.max_length}",
                reason="shape",
            )

    def _check_ports(self, inputs: Mapping[str, Payload], wanted: Sequence[str]) -> None:
        if sorted(inputs) != sorted(wanted):
            raise InvalidRequestError(
                f"this {self.part.replace('_', ' ')} takes {', '.join(wanted)}; got "
                f"{', '.join(sorted(inputs)) or 'nothing'}",
                param="prompt",
            )

    def check_values(self, inputs: Mapping[str, Payload]) -> None:
        """Raise `EmbeddingsError` for NaN, infinity or magnitudes beyond the bound."""
        for port, payload in inputs.items():
            if payload.dtype not in _DTYPES:
                continue
            flat = np.frombuffer(payload.data.view, NUMPY_DTYPES[payload.dtype])
            largest = float(np.abs(flat.astype(np.float32, copy=False)).max(initial=0))
            if not math.isfinite(largest):
                raise EmbeddingsError(
                    f"{port} must be finite: it has NaN or infinity", reason="not_finite"
                )
            if port.startswith(EMBEDS) and largest > self.max_abs:
                raise EmbeddingsError(
                    f"the magnitude of {port.removeprefix(EMBEDS)} is {largest:g}; at most "
                    f"{self.max_abs:g} is allowed",
                    reason="magnitude",
                )


def inputs_of(request: Request) -> dict[str, Payload]:
    """Return the payloads of a request by port. Raises `InvalidRequestError` for a port twice."""
    inputs: dict[str, Payload] = {}
    for given in request.inputs:
        if given.port in inputs:
            raise InvalidRequestError(f"there are two inputs called {given.port}")
        inputs[given.port] = given.value
    return inputs


def _check_range(param: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(
            f"{param} may be {least:g} to {most:g}, got {value:g}", param=param
        )


def _check_text(text: bytes, param: str) -> None:
    if len(text) > MAX_PROMPT_BYTES:
        raise InvalidRequestError(
            f"the {param.replace('_', ' ')} has {len(text)} bytes; at most {MAX_PROMPT_BYTES} are "
            "allowed",
            param=param,
        )
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the {param.replace('_', ' ')} is not UTF-8: {error.reason}", param=param
        ) from error


def _check_tensor(payload: Payload, shape: tuple[int, ...]) -> None:
    name = payload.port.removeprefix(EMBEDS)
    size = DTYPE_SIZES.get(payload.dtype, 0)
    if payload.dtype not in _DTYPES:
        raise EmbeddingsError(
            f"{name} is {payload.dtype}; allowed: {', '.join(_DTYPES)}", reason="dtype"
        )
    if payload.shape != shape:
        raise EmbeddingsError(
            f"the size of tensor must match the model's: {name} is {payload.shape}, not {shape}",
            reason="shape",
        )
    if len(payload.data) != math.prod(shape) * size:
        raise EmbeddingsError(
            f"{name} of {shape} {payload.dtype} has {math.prod(shape) * size} bytes, got "
            f"{len(payload.data)}",
            reason="shape",
        )
