"""Types of the routes of text-embeddings-inference."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.embeddings import InputsRequest
from inlay.api.openai.schema.scoring import Items, RankingRequest
from inlay.api.schema.described import QUESTION
from inlay.messages.fields import example, field

Direction: TypeAlias = Literal["Left", "Right", "left", "right"]

Truncate: TypeAlias = Annotated[
    bool | None,
    field("cut what is longer than the model reads; when absent the server's default."),
]
Side: TypeAlias = Annotated[
    Direction | None, field('side that is cut; "Right" when absent.', "Left")
]
PromptName: TypeAlias = Annotated[
    str | None, field("prompt of the model before each text.", "query")
]


class InputsOfTei(InputsRequest, kw_only=True):
    """Fields of its routes for vectors and classes."""

    truncate: Truncate = None
    truncation_direction: Side = None
    prompt_name: PromptName = None


class EmbedInputsRequest(InputsOfTei, kw_only=True):
    """A request to `/embed`, `/embed_all` or `/embed_sparse`.

    Attributes:
        inputs: a text, or several.
        normalize: give the vectors of `/embed` length 1 (true when absent).
        dimensions: number of first elements that are kept, of models trained for it.
    """

    inputs: Annotated[str | list[str], example([QUESTION])]
    normalize: bool = True
    dimensions: Annotated[int | None, example(256)] = None


class ComparedInputs(msgspec.Struct):
    """A text, and those that it is compared with."""

    source_sentence: Annotated[str, field("the text.", "a fox")]
    sentences: Annotated[list[str], field("those beside it.", ["a stone", "an animal"])]


class SimilarityOptions(msgspec.Struct):
    """Options of `/similarity`."""

    truncate: Truncate = None
    truncation_direction: Side = None
    prompt_name: PromptName = None


class SimilarityRequest(InputsRequest, kw_only=True):
    """A request to `/similarity`.

    Attributes:
        inputs: a text, and those that it is compared with.
        parameters: truncation, and the prompt before all texts.
    """

    inputs: Annotated[
        ComparedInputs,
        example({"source_sentence": "a fox", "sentences": ["a stone", "an animal"]}),
    ]
    parameters: Annotated[SimilarityOptions | None, example({"truncate": True})] = None


class PredictRequest(InputsOfTei, kw_only=True):
    """A request to `/predict`.

    Attributes:
        inputs: a text, or a list of one text, or of a pair of two, which is answered with its
            classes; a list of such lists is a batch, and is answered with a list for each.
        raw_scores: give logits (false when absent).
    """

    inputs: Annotated[str | list[str | list[str]], example([["a stone", "an animal"]])]
    raw_scores: bool = False


class RankRequest(RankingRequest, kw_only=True):
    """A request to `/rerank`: of `/v1/rerank`, or with `texts`, which is answered as a list.

    A field of one form that changes the answer is refused in the other. With `texts` those are
    `top_n`, `return_documents`, `auto_truncate`, `truncation_side` and `use_activation`.

    Attributes:
        documents: as in `/v1/rerank`; not with `texts`.
        texts: documents in the form of text-embeddings-inference.
        truncate: with `texts`, cut what is longer than the model reads; when absent the server's
            default.
        truncation_direction: with `texts`, side that is cut; "Right" when absent.
        raw_scores: with `texts`, give logits (false when absent).
        return_text: with `texts`, repeat each (false when absent).
    """

    documents: Annotated[Items | None, example(["a stone", "an animal"])] = None
    texts: Annotated[list[str] | None, example(["a stone", "an animal"])] = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool = False
    return_text: bool = False


class RankedText(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the `texts` of a rank, the best first."""

    index: Annotated[int, field("place of the text in the request, from 0.", 0)]
    score: Annotated[float, field("score of the text.", 0.93)]
    text: Annotated[str | None, field("the text, if it was asked for.", "an animal")] = None


class SparseValue(msgspec.Struct, frozen=True):
    """One weight of a sparse vector."""

    index: Annotated[int, field("id of the vocabulary.", 104)]
    value: Annotated[float, field("its weight.", 1.2)]


class Prediction(msgspec.Struct, frozen=True):
    """One class of a text, the likeliest first."""

    score: Annotated[float, field("probability of the class.", 0.9)]
    label: Annotated[str, field("the model's name of the class, or its number.", "positive")]


class ServedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The first model that gives vectors or scores, as text-embeddings-inference describes it."""

    model_id: Annotated[str, field("name of the model.", "bge-m3")]
    model_sha: None = None
    model_dtype: Annotated[str, field("dtype of its weights.", "float32")]
    model_type: Annotated[
        dict[str, Any], field("kind of the model.", {"embedding": {"pooling": "mean"}})
    ]
    max_input_length: Annotated[int, field("positions of an input at most.", 512)]
    max_client_batch_size: Annotated[int, field("inputs of a request at most.", 2048)]
    auto_truncate: Annotated[bool, field("longer inputs are cut unless a request says.", False)]
    version: Annotated[str, field("inlay's version.", "0.3.0")]


class Failure(msgspec.Struct, frozen=True):
    """An error."""

    error: Annotated[str, field("what came, and what is allowed.", "inputs must not be empty")]
    error_type: Annotated[
        Literal["Unhealthy", "Backend", "Overloaded", "Validation"],
        field("kind of the error.", "Validation"),
    ]
