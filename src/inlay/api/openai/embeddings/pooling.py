"""`POST /pooling` and `POST /classify`, as in vLLM."""

import time

import msgspec

from inlay.api.fields import answer_id, check_common
from inlay.api.openai.embeddings.encoding import About, Answer, Encoding
from inlay.api.openai.embeddings.gathering import (
    Array,
    embedding_card,
    normalized,
    vectors_of,
)
from inlay.api.openai.embeddings.logits import activated
from inlay.api.openai.embeddings.prompts import in_prompts, inputs_of
from inlay.api.openai.embeddings.route import normalizes
from inlay.api.openai.schema.embeddings import (
    ClassificationData,
    ClassificationRequest,
    ClassificationResponse,
    PoolingRequest,
)
from inlay.card import EmbeddingCard
from inlay.errors import InvalidRequestError
from inlay.http.parsed_request import read_request
from inlay.http.server import JSON_HEADER, Call
from inlay.request import Task
from inlay.router import ServedModel

_pooling_decoder = msgspec.json.Decoder(PoolingRequest)
_classification_decoder = msgspec.json.Decoder(ClassificationRequest)
_encode = msgspec.json.Encoder().encode

_TASKS = {Task.EMBED: "embed", Task.SCORE: "classify"}
"""vLLM's names of pooling tasks."""


async def pooling(call: Call) -> None:
    """Answer with each input's embedding, or with its class probabilities."""
    server = call.server
    incoming = await read_request(call, _pooling_decoder, in_prompts)
    request = incoming.parsed.request
    check_common(call, request)
    id_ = answer_id("pooling-", request.request_id)
    model = server.model(request.model, *_TASKS)
    card = embedding_card(model)
    classifies = _pooling_task(request, model) == "classify"
    if not classifies:
        normalizes(card, request.use_activation, model.name, "use_activation")
    encoding = Encoding.of(request)
    inputs = await inputs_of(call, incoming, model)
    encoding.check_count(len(inputs))
    size = max(incoming.size, 4 * len(inputs) * card.size)
    del incoming
    found, usage = await vectors_of(call, model, request, inputs, encoding.element_bytes)
    about = About(id_, int(time.time()), model.name, usage, "pooling")
    answer = await server.prepare(
        size, _pooled, found, card, request.use_activation, encoding, about, classifies
    )
    await call.bytes(answer.body, answer.media, more=answer.headers)


def _pooling_task(request: PoolingRequest, model: ServedModel) -> str:
    """Return the model's task. Raises `InvalidRequestError` if another one is requested."""
    served = [name for task, name in _TASKS.items() if task in model.card.tasks]
    if request.task is not None and request.task not in served:
        raise InvalidRequestError(
            f"task {request.task[:40]!r} is not served by the model `{model.name}`; it does "
            f"{' and '.join(served)}",
            param="task",
        )
    return request.task or served[0]


def _pooled(
    found: Array,
    card: EmbeddingCard,
    use_activation: bool | None,
    encoding: Encoding,
    about: About,
    classifies: bool,
) -> Answer:
    """Return the response. CPU work."""
    if classifies:
        return encoding.answer(activated(found, card.activation, use_activation), about)
    wanted = card.normalize if use_activation is None else use_activation
    return encoding.answer(normalized(found) if wanted else found, about)


async def classify(call: Call) -> None:
    """Answer with each input's class probabilities and its likeliest class."""
    server = call.server
    incoming = await read_request(call, _classification_decoder, in_prompts)
    request = incoming.parsed.request
    check_common(call, request)
    id_ = answer_id("classify-", request.request_id)
    model = server.model(request.model, Task.SCORE)
    card = embedding_card(model)
    inputs = await inputs_of(call, incoming, model)
    size = max(incoming.size, 4 * len(inputs) * card.size)
    del incoming
    found, usage = await vectors_of(call, model, request, inputs, Encoding().element_bytes)

    def body() -> bytes:
        probs = activated(found, card.activation, request.use_activation)
        data = [_classes(index, row, card) for index, row in enumerate(probs)]
        return _encode(
            ClassificationResponse(
                id=id_,
                created=int(time.time()),
                model=model.name,
                data=data,
                usage=usage,
            )
        )

    await call.bytes(await server.prepare(size, body), JSON_HEADER)


def _classes(index: int, probs: Array, card: EmbeddingCard) -> ClassificationData:
    best = int(probs.argmax())
    label = card.labels[best] if best < len(card.labels) else None
    return ClassificationData(
        index=index, label=label, probs=probs.tolist(), num_classes=len(probs)
    )
