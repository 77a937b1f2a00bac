"""Types of `/v1/models`."""

from typing import Annotated, Literal

import msgspec

from inlay.api.schema.described import HiddenSize
from inlay.messages.card import Exactness, Refusal, SelfCheck
from inlay.messages.fields import example, field


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits of one request to the model."""

    max_model_len: Annotated[int, field("positions of prompt and answer together.", 4096)]
    max_logprobs: Annotated[int, field("most of `logprobs` and `top_logprobs`.", 20)]
    max_choices: Annotated[int, field("most answers of a request, over all its prompts.", 128)]
    max_prompt_embeds_bytes: Annotated[int, field("bytes of one tensor of embeddings.", 67108864)]
    max_prompt_embeds_abs: Annotated[
        float | None,
        field("largest absolute element of a row; null where nothing limits it.", 10.0),
    ]
    max_body_bytes: Annotated[int, field("bytes of a body.", 134217728)]


class OutputFacts(msgspec.Struct, frozen=True):
    """An output of a model that embeds.

    Attributes:
        name: what requests call it.
        size: elements of a vector, ids of a vocabulary, or number of classes.
    """

    name: Annotated[str, example("dense")]
    size: Annotated[int, example(768)]


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

    size: Annotated[int, example(768)]
    normalize: bool
    dimensions: list[int] | Literal["any"]
    prompts: Annotated[dict[str, str], example({"query": "query: "})]
    default_prompt: Annotated[str | None, example("query")]
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

    max_items: Annotated[dict[str, int | None], example({"image": 4})]
    max_pixels: Annotated[int, example(16777216)]
    max_bytes: Annotated[int, example(20971520)]
    embeds: bool
    encoder_id: Annotated[str, example("9f86d081884c7d65")]


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

    width: Annotated[int, example(640)]
    height: Annotated[int, example(480)]
    max_pixels: Annotated[int, example(16777216)]
    steps: Annotated[int, example(20)]
    guidance: Annotated[float | None, example(4.5)]
    embeds: Annotated[dict[str, tuple[int, ...]], example({"prompt_embeds": [-1, 4096]})]
    positions: Annotated[int | None, example(77)]


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

    id: Annotated[str, field("name to send as `model`.", "my-model")]
    object: Literal["model"] = "model"
    created: Annotated[int, field("Unix time at which the server started.", 1764000000)]
    owned_by: Annotated[str, field('Always "inlay".', "inlay")] = "inlay"
    root: Annotated[
        str, field("the model, or the place that an adapter was loaded from.", "my-model")
    ]
    parent: Annotated[
        str | None, field("base model of an adapter; null for a model.", "my-model")
    ] = None
    max_model_len: Annotated[int, field("positions of prompt and answer together.", 4096)]
    hidden_size: HiddenSize
    vocab_size: Annotated[int, field("tokens of the vocabulary.", 32000)]
    dtype: Annotated[str, field("dtype that the model computes in.", "bfloat16")]
    embedding_table_id: Annotated[str, example("9f86d081884c7d65")]
    embedding_abs_max: Annotated[float, example(0.21)]
    weights_id: Annotated[str, field("identity of configuration and weights.", "9f86d081884c7d65")]
    weights_form: Annotated[str | msgspec.UnsetType, example("Q4_K_M")] = msgspec.UNSET
    engine: Annotated[str, field("engine and its version.", "torch 2.9.0")]
    capabilities: Annotated[
        list[str], example(["completions", "chat", "responses", "messages", "prompt_embeds"])
    ]
    limits: Annotated[ModelLimits, field("limits of one request.")]
    refusals: tuple[Refusal, ...] = ()
    resuming: dict[str, Exactness] = {}
    embedding: EmbeddingFacts | msgspec.UnsetType = msgspec.UNSET
    media: MediaFacts | msgspec.UnsetType = msgspec.UNSET
    image: ImageFacts | msgspec.UnsetType = msgspec.UNSET
    self_check: SelfCheck | msgspec.UnsetType = msgspec.UNSET
    adapters: Annotated[list[str], example(["my-adapter"])] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: Annotated[list[ModelEntry], field("the entries.")]
