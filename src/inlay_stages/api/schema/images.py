"""Types of `/v1/images/generations`."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.completions import EmbedsSource
from inlay.api.schema.described import ROWS, CreatedAt, PromptTokens, Stages, TotalTokens
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import example, field
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

    prompt: Annotated[str | None, example("a red fox")] = None
    prompt_embeds: Annotated[str | EmbedsSource | None, example({"ref": "pe-..."})] = None
    pooled_prompt_embeds: Annotated[str | EmbedsSource | None, example(ROWS)] = None
    negative_prompt_embeds: Annotated[str | EmbedsSource | None, example(ROWS)] = None
    model: str | None = None
    n: Annotated[Annotated[int, msgspec.Meta(ge=1, le=10)] | None, example(2)] = None
    size: Annotated[str | None, example("512x512")] = None
    response_format: Annotated[str | None, example("b64_json")] = None
    output_format: ImageFormat | None = None
    stream: bool | None = None
    partial_images: Annotated[Annotated[int, msgspec.Meta(ge=0, le=3)] | None, example(2)] = None
    seed: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] | None = None
    negative_prompt: Annotated[str | None, example("blurred")] = None
    num_inference_steps: Annotated[int | None, example(20)] = None
    guidance_scale: Annotated[float | None, example(4.5)] = None
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

    b64_json: Annotated[str, example("iVBORw0...")]


class ImageTokens(msgspec.Struct, frozen=True):
    """Positions of a prompt by their kind."""

    text_tokens: Annotated[int, field("positions of text or of embeddings.", 17)]
    image_tokens: Annotated[int, field("positions of images.", 0)] = 0


class ImagesUsage(msgspec.Struct, frozen=True):
    """Positions of the prompt, and of the images as the denoiser has them.

    `stages` has the share of each stage that worked, by its name, where the model is a pipeline.
    """

    input_tokens: PromptTokens
    output_tokens: Annotated[int, field("positions of the images, as the denoiser has them.", 1024)]
    total_tokens: TotalTokens
    input_tokens_details: Annotated[ImageTokens, field("more about the prompt.")]
    stages: Stages = msgspec.UNSET


class ImagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The images of a request."""

    created: CreatedAt
    data: Annotated[list[ImageData], field("the entries.")]
    output_format: Annotated[ImageFormat, field("format of the file.", "png")]
    size: Annotated[str, field("width and height in pixels.", "512x512")]
    usage: Annotated[ImagesUsage, field("Positions and tokens of this answer.")]
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

    b64_json: Annotated[str, field("the file in base64.", "iVBORw0...")]
    partial_image_index: Annotated[int, field("number of the partial image, from 0.", 0)]
    created_at: CreatedAt
    output_format: Annotated[ImageFormat, field("format of the file.", "png")]
    size: Annotated[str, field("width and height in pixels.", "512x512")]
    background: Literal["auto"] = "auto"
    quality: Literal["auto"] = "auto"


class CompletedImage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image_generation.completed"
):
    """Event with the image."""

    b64_json: Annotated[str, field("the file in base64.", "iVBORw0...")]
    created_at: CreatedAt
    output_format: Annotated[ImageFormat, field("format of the file.", "png")]
    size: Annotated[str, field("width and height in pixels.", "512x512")]
    usage: Annotated[ImagesUsage, field("Positions and tokens of this answer.")]
    background: Literal["auto"] = "auto"
    quality: Literal["auto"] = "auto"


ImageEvent: TypeAlias = PartialImage | CompletedImage | StreamFailure
"""An event of a stream."""
