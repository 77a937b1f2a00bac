"""Types of `/v1/images/generations`."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.completions import EmbedsSource
from inlay.api.schema.stages import StageUsage
from inlay.api.schema.unserved import Unserved
from inlay_stages.api.schema.failure import StreamFailure

ImageFormat: TypeAlias = Literal["png", "jpeg", "webp"]


class ImagesRequest(msgspec.Struct, kw_only=True):
    """A request to `/v1/images/generations`. Names beyond OpenAI's are vLLM-Omni's.

    Attributes:
        prompt: text that the images show; absent or anything where `prompt_embeds` is given.
        prompt_embeds: what the model's text encoder makes of a prompt: base64 of a tensor file of
            shape (positions, size), or with a leading 1, or a source. Needs --enable-prompt-embeds.
        pooled_prompt_embeds: further tensor of models that need one (FLUX), of shape (1, size);
            always with `prompt_embeds`.
        negative_prompt_embeds: as `prompt_embeds`, in the place of `negative_prompt`. Refused where
            the model takes none.
        model: served name; when absent the first model that makes images.
        n: number of images, 1 to 10; 1 when absent, and 1 alone in a stream.
        size: "WIDTHxHEIGHT" in pixels, multiples of what the model needs; the model's own when
            absent or "auto".
        response_format: only "b64_json", as when absent.
        output_format: of the files; "png" when absent.
        stream: answer with server-sent events; false when absent.
        partial_images: events with the image so far, 0 to 3, in a stream; 0 when absent.
        seed: the source of the noise, which the images of a request draw from in turn; a random one
            when absent or -1.
        negative_prompt: text of what images should not show. Refused where the model takes none.
        num_inference_steps: steps of the denoiser, 1 to --max-inference-steps; the model's own when
            absent.
        guidance_scale: scale of guidance; the model's own when absent. Refused where the model
            takes none.
        user: accepted; nothing depends on it.
        request_id: name of the request in logs: 1 to 128 visible ASCII characters.
        priority: lower values are served first, 0 when absent; others only with --scheduling-policy
            priority.
    """

    prompt: str | None = None
    prompt_embeds: str | EmbedsSource | None = None
    pooled_prompt_embeds: str | EmbedsSource | None = None
    negative_prompt_embeds: str | EmbedsSource | None = None
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=10)] | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: ImageFormat | None = None
    stream: bool | None = None
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] | None = None
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    user: str | None = None
    request_id: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    background: Unserved = None
    complexity: Unserved = None
    frame_count: Unserved = None
    frame_duration_ms: Unserved = None
    height: Unserved = None
    image: Unserved = None
    images: Unserved = None
    mask: Unserved = None
    svg: Unserved = None
    width: Unserved = None
    moderation: Unserved = None
    output_compression: Unserved = None
    quality: Unserved = None
    style: Unserved = None

    bot_task: Unserved = None
    extra_params: Unserved = None
    flow_shift: Unserved = None
    generator_device: Unserved = None
    layers: Unserved = None
    lora: Unserved = None
    return_stage_metrics: Unserved = None
    system_prompt: Unserved = None
    true_cfg_scale: Unserved = None
    use_system_prompt: Unserved = None
    vae_use_slicing: Unserved = None
    vae_use_tiling: Unserved = None


class ImageData(msgspec.Struct, frozen=True):
    """One image.

    Attributes:
        b64_json: its file in base64.
    """

    b64_json: str


class ImageTokens(msgspec.Struct, frozen=True):
    """Positions of a prompt by their kind."""

    text_tokens: int
    image_tokens: int = 0


class ImagesUsage(msgspec.Struct, frozen=True):
    """Positions of the prompt, and of the images as the denoiser has them.

    `stages` has the share of each stage that worked, by its name, where the model is a pipeline.
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageTokens
    stages: dict[str, StageUsage] | msgspec.UnsetType = msgspec.UNSET


class ImagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The images of a request."""

    created: int
    data: list[ImageData]
    output_format: ImageFormat
    size: str
    usage: ImagesUsage
    background: Literal["auto"] = "auto"
    quality: Literal["auto"] = "auto"


class PartialImage(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag="image_generation.partial_image",
):
    """Event with the image so far."""

    b64_json: str
    partial_image_index: int
    created_at: int
    output_format: ImageFormat
    size: str
    background: Literal["auto"] = "auto"
    quality: Literal["auto"] = "auto"


class CompletedImage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image_generation.completed"
):
    """Event with the image."""

    b64_json: str
    created_at: int
    output_format: ImageFormat
    size: str
    usage: ImagesUsage
    background: Literal["auto"] = "auto"
    quality: Literal["auto"] = "auto"


ImageEvent: TypeAlias = PartialImage | CompletedImage | StreamFailure
"""An event of a stream."""
