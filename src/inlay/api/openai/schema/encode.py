"""Types of `/v1/encode`."""

from typing import Annotated, Any, Literal

import msgspec

from inlay.api.openai.schema.embeddings import InputsRequest
from inlay.api.schema.described import ROWS, CreatedAt, ModelName, PromptTokens, TotalTokens
from inlay.messages.fields import example, field


class EncodeRequest(InputsRequest, kw_only=True):
    """A request for the rows of images or audio.

    Attributes:
        input: an item, or a list of them: an image's URL as a string, or a part as in a chat,
            `{"type": "image_url", "image_url": {"url": ..., "detail": ...}}` or `{"type":
            "input_audio", "input_audio": {"data": ..., "format": ...}}`; also `input_image` and
            `audio_url`. At most --max-embedding-inputs.
        encoding_format: "base64" (when absent) of a tensor file (`torch.save`), or "float",
            numbers.
    """

    input: Annotated[
        str | dict[str, Any] | list[str | dict[str, Any]],
        example("https://example.com/harbour.jpg"),
    ]
    encoding_format: Literal["base64", "float"] = "base64"


class EncodedImage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="image_embeds"
):
    """Rows of one image. As it is, it is a value of `image_embeds` in a chat.

    Attributes:
        index: of the image in `input`.
        image_embeds: base64 of a tensor file of shape (num_tokens, width), or the numbers. The
            width is the hidden size; inner features of the image follow where the model has them.
        image_grid_thw: [time, height, width] in patches, or in rows or tiles where tokens stand
            between these; null for models without a grid.
        num_tokens: positions that the image's rows take in a prompt.
    """

    index: Annotated[int, example(0)]
    image_embeds: Annotated[str | list[list[float]], example(ROWS)]
    image_grid_thw: Annotated[list[int] | None, example([1, 16, 16])]
    num_tokens: Annotated[int, example(17)]


class EncodedAudio(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="audio_embeds"
):
    """Rows of one piece of audio. As it is, it is a value of `audio_embeds` in a chat.

    Attributes:
        index: of the audio in `input`.
        audio_embeds: base64 of a tensor file of shape (num_tokens, hidden size), or the numbers.
        num_tokens: positions that the rows take in a prompt.
    """

    index: Annotated[int, example(0)]
    audio_embeds: Annotated[str | list[list[float]], example(ROWS)]
    num_tokens: Annotated[int, example(17)]


class EncodeUsage(msgspec.Struct, frozen=True):
    """Positions that the rows of all items take in a prompt."""

    prompt_tokens: PromptTokens
    total_tokens: TotalTokens


class EncodeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of all items, in their order."""

    id: Annotated[str, field("id of this answer.", "enc-5d0f")]
    object: Literal["list"] = "list"
    created: CreatedAt
    model: ModelName
    data: Annotated[list[EncodedImage | EncodedAudio], field("the entries.")]
    usage: Annotated[EncodeUsage, field("Positions and tokens of this answer.")]
