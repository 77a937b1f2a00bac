"""`Painter`: what a loaded pipeline, or a part of it, computes. Runs on one thread."""

from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np
import torch
from PIL import Image

from inlay.engine.diffusers import denoising
from inlay.engine.diffusers.families.base import Painting
from inlay.engine.diffusers.loading import Loaded
from inlay.errors import EngineError, InvalidRequestError
from inlay.prompt import Buffer
from inlay.request import Diffusion, ImageFormat, Payload
from inlay.tensors.tensor import NUMPY_DTYPES

NEGATIVE = "negative_"
"""Before the names of tensors that stand for the negative prompt."""

EMBEDS = "embeds."
"""Before the ports of tensors that stand for a prompt."""


class Painter:
    """The models of a pipeline or of a part, called for requests.

    Args:
        loaded: the models.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._family = loaded.family

    def encode(self, text: str, params: Diffusion) -> tuple[dict[str, torch.Tensor], int]:
        """Run the text encoders over a prompt, and over the negative prompt where it takes part.

        Returns:
            The tensors by name, and the tokens of the prompt.

        Raises:
            InvalidRequestError: a prompt longer than the encoders read.
        """
        count = self._check_length(text, "prompt")
        found = dict(self._encoded(text))
        if self._guided(params):
            found |= self._encoded_negative(params)
        return found, count

    def _guided(self, params: Diffusion, *, negative: bool = False) -> bool:
        given = negative or params.negative is not None
        return self._family.guides(params.guidance, negative=given)

    def _encoded_negative(self, params: Diffusion) -> dict[str, torch.Tensor]:
        self._check_length(params.negative or "", "negative_prompt")
        found = self._encoded(params.negative or "")
        return {NEGATIVE + name: tensor for name, tensor in found.items()}

    @torch.inference_mode()
    def _encoded(self, text: str) -> Mapping[str, torch.Tensor]:
        return self._family.encode(text)

    def _check_length(self, text: str, param: str) -> int:
        count, limit = self._family.count_tokens(text)
        if count > limit:
            raise InvalidRequestError(
                f"the {param.replace('_', ' ')} has {count} tokens; this model reads at most "
                f"{limit}",
                param=param,
            )
        return count

    @torch.inference_mode()
    def begin(self, embeds: dict[str, torch.Tensor], params: Diffusion) -> Painting:
        """Draw the noise of a request's images.

        Args:
            embeds: of the prompt, and of the negative prompt where it takes part. Where it does
                and has none, the text encoder makes it.
            params: of the request.

        Raises:
            InvalidRequestError: no or unlike embeddings of a negative prompt that is needed, or a
                number of steps that the scheduler does not do.
        """
        pipeline = self._loaded.pipeline
        has_negative = any(name.startswith(NEGATIVE) for name in embeds)
        negative = None
        if self._guided(params, negative=has_negative):
            if not has_negative:
                embeds |= self._negative_for(params)
            negative = {
                name.removeprefix(NEGATIVE): tensor
                for name, tensor in embeds.items()
                if name.startswith(NEGATIVE)
            }
        positive = {
            name: tensor for name, tensor in embeds.items() if not name.startswith(NEGATIVE)
        }
        painting = Painting(
            width=params.width,
            height=params.height,
            positions=self._loaded.facts.positions(params.width, params.height),
            guidance=params.guidance,
            positive=positive,
            negative=negative,
            scheduler=type(pipeline.scheduler).from_config(pipeline.scheduler.config),
            generator=torch.Generator().manual_seed(params.seed),
        )
        self._check_pair(painting)
        try:
            self._family.begin(painting, params.steps, params.count)
        except ValueError as error:
            raise InvalidRequestError(
                f"this scheduler does not do {params.steps} steps: {error}",
                param="num_inference_steps",
            ) from error
        return painting

    def _check_pair(self, painting: Painting) -> None:
        for name, tensor in (painting.negative or {}).items():
            other = painting.positive[name]
            if self._family.equal_lengths and tensor.shape != other.shape:
                raise InvalidRequestError(
                    f"{NEGATIVE}{name} is {tuple(tensor.shape)} and {name} {tuple(other.shape)}; "
                    "both must have the same shape",
                    param="prompt_embeds",
                )

    def _negative_for(self, params: Diffusion) -> dict[str, torch.Tensor]:
        if not self._loaded.has("text_encoder"):
            raise InvalidRequestError(
                f"guidance of {params.guidance:g} needs the embeddings of a negative prompt",
                param="guidance_scale",
            )
        return self._encoded_negative(params)

    def step(self, paintings: Sequence[Painting], max_positions: int) -> list[EngineError | None]:
        """Do the next step of each painting; return, for each, why it cannot go on."""
        denoising.step(self._family, paintings, max_positions)
        return [
            EngineError("the model's output was not finite: NaN or infinity came of this prompt")
            if painting.done and not torch.isfinite(painting.latents).all()
            else None
            for painting in paintings
        ]

    @torch.inference_mode()
    def pixels(self, latents: torch.Tensor, params: Diffusion) -> Image.Image:
        """Decode the latents of one image, [1, ...]."""
        found = self._family.decode(latents, params.width, params.height)
        if not torch.isfinite(found).all():
            raise EngineError("the image was not finite: NaN or infinity came of these latents")
        image: Image.Image
        (image,) = self._loaded.pipeline.image_processor.postprocess(found, output_type="pil")
        return image

    def tensors(self, payloads: Mapping[str, Payload]) -> dict[str, torch.Tensor]:
        """Return checked payloads as tensors of the served dtype, by port."""
        return {
            name: _tensor(payload).to(self._loaded.device, self._loaded.dtype)
            for name, payload in payloads.items()
        }


def _tensor(payload: Payload) -> torch.Tensor:
    flat = np.frombuffer(payload.data.view, NUMPY_DTYPES[payload.dtype]).reshape(payload.shape)
    if payload.dtype == "bfloat16":
        return torch.from_numpy(flat.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(flat.copy())


def payload(port: str, tensor: torch.Tensor, *, last: bool = True) -> Payload:
    """Return a tensor as a payload, in its own dtype."""
    tensor = tensor.detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = tensor.flatten().view(torch.uint8).numpy()
    return Payload(port, dtype, tuple(tensor.shape), Buffer(data.data), last)


_OPTIONS = {"png": {}, "jpeg": {"quality": 95}, "webp": {"quality": 95}}


def image_file(image: Image.Image, image_format: ImageFormat) -> bytes:
    """Return the file of an image."""
    file = BytesIO()
    image.save(file, image_format.upper(), **_OPTIONS[image_format])
    return file.getvalue()


__all__ = ["EMBEDS", "NEGATIVE", "Painter", "image_file", "payload"]
