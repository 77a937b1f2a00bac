"""`POST /v1/completions`."""

import msgspec

from inlay.api.fields import answer_id
from inlay.api.generation.generation import generation_of
from inlay.api.generation.grammars import grammar_of
from inlay.api.generation.logprobs import check_has_ids
from inlay.api.generation.respond import respond
from inlay.api.generation.sampling import check_request, sampling_of
from inlay.api.openai.completions.prompts import PromptReader, in_completion
from inlay.api.openai.completions.shape import CompletionShape
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.errors import InvalidRequestError
from inlay.http.bodies.accounting import size_of
from inlay.http.bodies.embeds import Embeddings
from inlay.http.parsed_request import read_request
from inlay.http.server import Call
from inlay.prompt import Prompt
from inlay.request import Task

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(call: Call) -> None:
    """Answer one completions request."""
    server = call.server
    incoming = await read_request(call, _decoder, in_completion)
    request = incoming.parsed.request
    check_request(call, request)
    model = server.model(request.model, Task.GENERATE)
    card = model.card
    if card.stage is not None and card.stage.graph.before_text:
        raise InvalidRequestError(
            f"the pipeline `{card.name}` is several language models in a row; they take chats, as "
            "by /v1/chat/completions",
            param="model",
        )
    grammar = grammar_of(request, card)
    renderer = await server.renderers.of(card)
    reader = PromptReader(request, incoming.sources, model, renderer)
    embeddings = await incoming.embeddings(call, card)
    prompts, size = await server.prepare(
        incoming.size,
        _prompts,
        reader,
        embeddings,
        request,
        server.settings.max_choices,
    )
    del incoming, embeddings, reader
    request.prompt = request.prompt_embeds = None
    call.memory.settle(prompts, size)
    _check_has_ids(request, prompts)
    sampling = sampling_of(
        request,
        model,
        renderer,
        prompts,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        echoed=request.logprobs if request.echo else None,
        grammar=grammar,
        settings=server.settings,
    )
    response_id = answer_id("cmpl-", request.request_id)
    generation = generation_of(
        call, request, response_id, model, renderer, prompts, sampling, request.max_tokens
    )
    shape = CompletionShape(response_id, request, model.name, renderer, generation)
    await respond(call, request, model, generation, shape)


def _prompts(
    reader: PromptReader, embeddings: Embeddings, request: CompletionRequest, most: int
) -> tuple[list[Prompt], int]:
    """Return the prompts of a request, and the bytes of its other fields."""
    prompts = reader.prompts(embeddings, most=most)
    asked = len(prompts) * request.candidates
    if asked > most:
        param = "n" if request.best_of is None else "best_of"
        raise InvalidRequestError(
            f"the request asks for {asked} choices; at most {most} are allowed", param=param
        )
    if not all(map(len, prompts)):
        raise InvalidRequestError("prompt must have at least one position", param="prompt")
    return prompts, size_of(request, "prompt", "prompt_embeds")


def _check_has_ids(request: CompletionRequest, prompts: list[Prompt]) -> None:
    """Raise `InvalidRequestError` for fields that these prompts do not support."""
    if request.suffix:
        check_has_ids(prompts, "suffix")
        raise InvalidRequestError("suffix is not supported", param="suffix")
    if request.echo:
        check_has_ids(prompts, "echo")
