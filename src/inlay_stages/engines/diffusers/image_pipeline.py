"""`ImagePipeline`: what a loaded pipeline, or a part of it, computes. Runs on one thread."""

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO

import numpy as np
import torch
from PIL import Image

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.torch.failures import memory_too_small
from inlay.messages.prompt import Buffer
from inlay.messages.request import Payload
from inlay.tensors.tensor import NUMPY_DTYPES
from inlay_stages.engines.diffusers import denoising
from inlay_stages.engines.diffusers.families.base import DenoiseState, DiffusionFamily
from inlay_stages.engines.diffusers.loading import LoadedPipeline, weighted
from inlay_stages.engines.diffusers.lora import PipelineLoras
from inlay_stages.params import Diffusion, ImageFormat

NEGATIVE = "negative_"
"""Before the names of tensors that stand for the negative prompt."""

EMBEDS = "embeds."
"""Before the ports of tensors that stand for a prompt."""


def has_negative(names: Iterable[str]) -> bool:
    """Return True if there are tensors of a negative prompt among those of such names."""
    return any(name.startswith(NEGATIVE) for name in names)


def check_length(family: DiffusionFamily, text: str, param: str) -> int:
    """Return the tokens of a text. Raises `InvalidRequestError` if they are too many."""
    count, limit = family.count_tokens(text)
    if count > limit:
        raise InvalidRequestError(
            f"the {param.replace('_', ' ')} has {count} tokens; this model reads at most {limit}",
            param=param,
        )
    return count


class ImagePipeline:
    """The models of a pipeline or of a part, called for requests.

    Args:
        loaded: the models.
        max_lora_rank: of adapters; None: they are off.

    Attributes:
        loras: the adapters.
    """

    def __init__(self, loaded: LoadedPipeline, max_lora_rank: int | None = None) -> None:
        self._loaded = loaded
        self._family = loaded.family
        adapted = weighted((*loaded.family.text_encoder, *loaded.family.denoiser))
        here = {name: loaded.models[name] for name in adapted if name in loaded.models}
        self.loras = PipelineLoras(here, [one for one in adapted if one not in here], max_lora_rank)

    @torch.inference_mode()
    def encode(
        self,
        text: str | None,
        given: Mapping[str, torch.Tensor],
        params: Diffusion,
        adapter: str | None = None,
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Run the text encoders over what has no tensors yet: the prompt, the negative prompt.

        Args:
            text: the prompt; None where `given` has its tensors.
            given: tensors by name, of the prompt, the negative prompt, both or neither.
            params: of the request.
            adapter: key of the adapter of the text encoders, or None.

        Returns:
            All tensors that take part, by name, and the positions of the prompt.

        Raises:
            InvalidRequestError: a prompt longer than the encoders read.
        """
        found = dict(given)
        if text is None:
            count = len(found["prompt_embeds"])
        else:
            count = check_length(self._family, text, "prompt")
            found |= self._encoded(text, adapter)
        negative = params.negative
        if not has_negative(found) and self._guides(params, negative=negative is not None):
            check_length(self._family, negative or "", "negative_prompt")
            encoded = self._encoded(negative or "", adapter)
            found |= {NEGATIVE + name: tensor for name, tensor in encoded.items()}
        return found, count

    def _encoded(self, text: str, adapter: str | None) -> Mapping[str, torch.Tensor]:
        with self.loras.used(adapter):
            return self._family.encode(text)

    def _guides(self, params: Diffusion, *, negative: bool) -> bool:
        return self._loaded.facts.guides(params.guidance, negative=negative)

    @torch.inference_mode()
    def begin(
        self, embeds: dict[str, torch.Tensor], params: Diffusion, adapter: str | None = None
    ) -> DenoiseState:
        """Draw the noise of a request's images.

        Args:
            embeds: of the prompt, and of the negative prompt where it takes part.
            params: of the request.
            adapter: key of the denoiser's adapter, or None.

        Raises:
            InvalidRequestError: a number of steps that the scheduler does not do.
        """
        pipeline = self._loaded.pipeline
        negative = None
        if self._guides(params, negative=has_negative(embeds)):
            negative = {
                name.removeprefix(NEGATIVE): tensor
                for name, tensor in embeds.items()
                if name.startswith(NEGATIVE)
            }
        positive = {
            name: tensor for name, tensor in embeds.items() if not name.startswith(NEGATIVE)
        }
        painting = DenoiseState(
            width=params.width,
            height=params.height,
            positions=self._loaded.facts.positions(params.width, params.height),
            guidance=params.guidance,
            positive=positive,
            negative=negative,
            scheduler=type(pipeline.scheduler).from_config(pipeline.scheduler.config),
            generator=torch.Generator().manual_seed(params.seed),
            adapter=adapter,
            preview_every=params.preview_every,
        )
        try:
            self._family.begin(painting, params.steps, params.count)
        except ValueError as error:
            raise InvalidRequestError(
                f"this scheduler does not do {params.steps} steps: {error}",
                param="num_inference_steps",
            ) from error
        return painting

    def step(
        self, paintings: Sequence[DenoiseState], max_positions: int
    ) -> list[EngineError | None]:
        """Do the next step of each painting; return, for each, why it cannot go on."""
        too_large = denoising.step(self._family, paintings, max_positions, self.loras)
        return [_error(painting, painting in too_large) for painting in paintings]

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
            name: tensor_of(payload).to(self._loaded.device, self._loaded.dtype)
            for name, payload in payloads.items()
        }


def _error(painting: DenoiseState, too_large: bool) -> EngineError | None:
    if too_large:
        return memory_too_small(
            f"{len(painting.latents)} images of {painting.width}x{painting.height}"
        )
    if painting.shows and not torch.isfinite(painting.shown).all():
        return EngineError("the model's output was not finite: NaN or infinity came of this prompt")
    return None


def tensor_of(payload: Payload) -> torch.Tensor:
    """Return a checked payload as a tensor, in its own dtype."""
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
    file = BytesIO()
    image.save(file, image_format.upper(), **_OPTIONS[image_format])
    return file.getvalue()
