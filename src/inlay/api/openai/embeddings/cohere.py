"""`POST /v1/embed`, `/v2/embed`: translated to a request for embeddings and run by its code."""

from collections.abc import Sequence
from functools import partial

import msgspec

from inlay.api.fields import own_names
from inlay.api.openai.embeddings.aliases import NamedTruncation
from inlay.api.openai.embeddings.encoding import About, EmbeddingAnswer, Encoding
from inlay.api.openai.embeddings.gathering import Gathered, WantedOutputs, normalized, stacked
from inlay.api.openai.embeddings.route import EmbeddingsPlan, VectorForm, answer_inputs
from inlay.api.openai.schema.cohere import (
    BilledUnits,
    EmbedFloatsResponse,
    EmbedMeta,
    EmbedRequest,
    EmbedResponse,
    VectorType,
)
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.http.bodies.base64_extractor import Parsed
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.server import JSON_HEADER, Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.request import Task
from inlay.router import ServedModel

_decoder = msgspec.json.Decoder(EmbedRequest)
_encode = msgspec.json.Encoder().encode

_ROLES = ("search_query", "search_document")
_FIELDS = {
    "input": "texts",
    "dimensions": "output_dimension",
    "truncate_prompt_tokens": "max_tokens",
    "role": "input_type",
    "prompt_name": "input_type",
}
"""Fields of a request for embeddings, and Cohere's that they come from."""

_ENCODINGS: dict[VectorType, Encoding] = {
    "float": Encoding(),
    "base64": Encoding("base64"),
    "int8": Encoding(dtype="int8"),
    "binary": Encoding(dtype="binary"),
    "ubinary": Encoding(dtype="ubinary"),
}


async def embed(call: Call) -> None:
    """Answer with the vectors of texts in each type that is asked for."""
    await _answer(call, listed=False)


async def embed_v1(call: Call) -> None:
    """As `embed`, but where no types are asked for the vectors are a list."""
    await _answer(call, listed=True)


async def _answer(call: Call, *, listed: bool) -> None:
    incoming = await read_request(call, _decoder, lambda _: ())
    asked = incoming.parsed.request
    model = call.server.model(asked.model, Task.EMBED)
    request = _translated(asked, model)
    with own_names(_FIELDS):
        await answer_inputs(
            call,
            ParsedRequest(Parsed(request, {}), incoming.size, ()),
            asked,
            "embed-",
            model,
            partial(_plan, asked, request, listed and not asked.embedding_types),
        )


def _translated(asked: EmbedRequest, model: ServedModel) -> EmbeddingRequest:
    card, kind = model.card.embedding, asked.input_type
    named = kind if kind not in _ROLES and card is not None and kind in card.prompts else None
    return EmbeddingRequest(
        model=asked.model,
        input=[*asked.texts],
        role=kind if kind in _ROLES else None,
        prompt_name=named,
        dimensions=asked.output_dimension,
        truncate_prompt_tokens=asked.max_tokens,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        request_id=asked.request_id,
        **NamedTruncation.of(asked.truncate or "END")._asdict(),
    )


def _plan(
    asked: EmbedRequest,
    request: EmbeddingRequest,
    listed: bool,
    model: ServedModel,
    card: EmbeddingCard,
) -> EmbeddingsPlan:
    types = list(dict.fromkeys(asked.embedding_types or ("float",)))
    form = VectorForm.of(request, card, model.name)
    each = sum(_ENCODINGS[kind].element_bytes for kind in types)

    def make(found: Sequence[Gathered], about: About) -> EmbeddingAnswer:
        vectors = stacked(found, "dense")[:, : form.dimensions]
        vectors = normalized(vectors) if form.normalize else vectors
        shown = {
            kind: [_ENCODINGS[kind].vectors("one", row)["one"] for row in vectors] for kind in types
        }
        meta = EmbedMeta(BilledUnits(about.usage.prompt_tokens))
        response: EmbedResponse | EmbedFloatsResponse
        if listed:
            response = EmbedFloatsResponse(
                id=about.id, embeddings=shown["float"], texts=asked.texts, meta=meta
            )
        else:
            response = EmbedResponse(id=about.id, embeddings=shown, texts=asked.texts, meta=meta)
        return EmbeddingAnswer(_encode(response), JSON_HEADER)

    return EmbeddingsPlan(Encoding(), WantedOutputs(("dense",), each), make)
