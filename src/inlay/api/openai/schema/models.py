"""Types of `/v1/models`."""

from typing import Literal

import msgspec

from inlay.messages.card import Exactness, Refusal, SelfCheck


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits of one request to the model."""

    max_model_len: int
    max_logprobs: int
    max_choices: int
    max_prompt_embeds_bytes: int
    max_prompt_embeds_abs: float | None
    max_body_bytes: int


class OutputFacts(msgspec.Struct, frozen=True):
    """An output of a model that embeds.

    Attributes:
        name: what requests call it.
        size: elements of a vector, ids of a vocabulary, or number of classes.
    """

    name: str
    size: int


class EmbeddingFacts(msgspec.Struct, frozen=True):
    """Options of a model that makes embeddings or scores.

    Attributes:
        size: elements of a vector, or labels of a pair.
        normalize: True if vectors have length 1 by default.
        dimensions: values that `dimensions` may have, or "any" up to `size`.
        prompts: prompts that may be put before texts, by name.
        default_prompt: name of the prompt that is used when the request names none.
        outputs: what requests may name, the first unless they do.
    """

    size: int
    normalize: bool
    dimensions: list[int] | Literal["any"]
    prompts: dict[str, str]
    default_prompt: str | None
    outputs: list[OutputFacts]


class MediaFacts(msgspec.Struct, frozen=True):
    """Limits of the media in one prompt.

    Attributes:
        max_items: most items by kind, "image", "audio" or "video"; null where nothing limits them.
        max_pixels: of an image as it comes.
        max_bytes: of one file.
        embeds: True if embeddings of a client's own encoder are accepted.
        encoder_id: identity of the encoder with its settings: rows of equal files are equal where
            this is.
    """

    max_items: dict[str, int | None]
    max_pixels: int
    max_bytes: int
    embeds: bool
    encoder_id: str


class ImageFacts(msgspec.Struct, frozen=True):
    """Images of a model, and the tensors that stand for their prompts.

    Attributes:
        width: in pixels, unless a request says otherwise.
        height: likewise.
        max_pixels: of an image.
        steps: unless a request says otherwise.
        guidance: scale unless a request says otherwise; null where the model takes none.
        embeds: shape of each tensor by the name of its field; -1 is any number of positions, up to
            `max_model_len`.
        positions: of a prompt where guidance needs as many of the negative prompt: what the text
            encoder makes of any text; null elsewhere.
    """

    width: int
    height: int
    max_pixels: int
    steps: int
    guidance: float | None
    embeds: dict[str, tuple[int, ...]]
    positions: int | None


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One served model.

    Attributes:
        capabilities: "completions", "chat", "responses", "messages", "embeddings", "score",
            "rerank", "classify", "encode", "image_generation", "prompt_embeds",
            "embedding_lookup"; "images", "audio" and "video" where its prompts may hold such media;
            "image_output" where its chats may be drawn.
        weights_form: how the model's files hold its weights, and what is made of them; absent for
            plain tensors.
        embedding_table_id: identity of the input embedding table; clients write it into the
            tensor files they send.
        embedding_abs_max: largest absolute value in that table.
        refusals: features that its engine does not support, with the reason.
        resuming: continuation of an answer after its worker was lost, by feature: "exact",
            "rounded", "sampled" or "impossible"; the last two end with an error.
        embedding: options of a model that makes embeddings or scores.
        media: limits of images, audio and video; of a model that takes any.
        image: sizes and tensors of a model that makes images.
        self_check: comparison of the loaded model with its own code, at its worker's start.
        adapters: names of the loaded adapters.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "inlay"
    root: str
    parent: str | None = None
    max_model_len: int
    hidden_size: int
    vocab_size: int
    dtype: str
    embedding_table_id: str
    embedding_abs_max: float
    weights_id: str
    weights_form: str | msgspec.UnsetType = msgspec.UNSET
    engine: str
    capabilities: list[str]
    limits: ModelLimits
    refusals: tuple[Refusal, ...] = ()
    resuming: dict[str, Exactness] = {}
    embedding: EmbeddingFacts | msgspec.UnsetType = msgspec.UNSET
    media: MediaFacts | msgspec.UnsetType = msgspec.UNSET
    image: ImageFacts | msgspec.UnsetType = msgspec.UNSET
    self_check: SelfCheck | msgspec.UnsetType = msgspec.UNSET
    adapters: list[str] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]
