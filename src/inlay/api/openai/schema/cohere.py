"""Types of `/v1/embed` and `/v2/embed`, in Cohere's form."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.embeddings import InputsRequest
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import example, field

VectorType: TypeAlias = Literal["float", "int8", "binary", "ubinary", "base64"]


class EmbedRequest(InputsRequest, kw_only=True):
    """A request to `/v1/embed` or `/v2/embed`.

    Attributes:
        texts: to embed, at least one.
        input_type: "search_query" and "search_document" choose the model's prompt of this role;
            "classification" and "clustering" one of that name, if the model has it.
        embedding_types: forms of each vector; "float" when absent. "int8" has a factor of its own
            for each vector, which is not told: compare by cosine.
        output_dimension: number of first elements that are kept, of models trained for it.
        truncate: what is cut off a text beyond the model's limit: "END" (when absent), "START", or
            "NONE": it is refused.
        max_tokens: positions of a text that are kept.
    """

    texts: Annotated[list[str], example(["a red fox"])]
    input_type: (
        Literal["search_query", "search_document", "classification", "clustering"] | None
    ) = None
    embedding_types: Annotated[list[VectorType] | None, example(["float", "int8"])] = None
    output_dimension: Annotated[int | None, example(256)] = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[Annotated[int, msgspec.Meta(ge=1)] | None, example(256)] = None

    images: Unserved = None
    inputs: Unserved = None


class ApiVersion(msgspec.Struct, frozen=True):
    """Version of Cohere's API."""

    version: Literal["2"] = "2"


class BilledUnits(msgspec.Struct, frozen=True):
    """Positions of all texts."""

    input_tokens: Annotated[int, field("positions of all texts.", 17)]


class EmbedMeta(msgspec.Struct, frozen=True):
    """Metadata of an answer."""

    billed_units: Annotated[BilledUnits, field("what was read.")]
    api_version: Annotated[ApiVersion, field("version of this form.")] = ApiVersion()


class EmbedResponse(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="response_type", tag="embeddings_by_type"
):
    """The response of `/v2/embed`."""

    id: Annotated[str, field("id of this answer.", "embed-5d0f")]
    embeddings: Annotated[
        dict[VectorType, Any],
        field("vectors of the texts, in their order, by type.", {"float": [[0.12, -0.07]]}),
    ]
    texts: Annotated[list[str], field("as the request had them.", ["a red fox"])]
    meta: Annotated[EmbedMeta, field("what was read.")]


class EmbedFloatsResponse(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="response_type", tag="embeddings_floats"
):
    """The response of `/v1/embed` where no types are asked for."""

    id: Annotated[str, field("id of this answer.", "embed-5d0f")]
    embeddings: Annotated[Any, field("vectors of the texts, in their order.", [[0.12, -0.07]])]
    texts: Annotated[list[str], field("as the request had them.", ["a red fox"])]
    meta: Annotated[EmbedMeta, field("what was read.")]
