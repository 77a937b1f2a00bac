"""Inputs of `/v1/embeddings`, `/pooling` and `/classify`: texts, ids, chats or embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inlay.api.fields import check_depths, check_ids
from inlay.api.generation.parts import in_messages
from inlay.api.generation.truncation import Truncation
from inlay.api.openai.embeddings.gathering import check_count, embedding_card
from inlay.api.openai.embeddings.inputs import Chats, Inputs, PromptInputs, TextInputs
from inlay.api.openai.embeddings.roles import DOCUMENT, part_of
from inlay.api.openai.schema.embeddings import EmbeddingRequest, PromptsRequest, TextsRequest
from inlay.api.openai.sources import in_prompt_embeds
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Embeddings, Source
from inlay.http.parsed_request import ParsedRequest
from inlay.http.references import embeddings_of
from inlay.http.server import Call
from inlay.messages.prompt import Prompt, Tokens
from inlay.render import Renderer
from inlay.router import ServedModel

_OF_TEXTS = ("prompt_name", "role", "input_type")
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def in_prompts(request: PromptsRequest) -> list[Source]:
    """Return the sources of a request for vectors: `prompt_embeds`, then its chats, in order."""
    found: list[Source] = [*in_prompt_embeds(request.prompt_embeds)]
    for index, (path, chat) in enumerate(zip(request.chat_paths, request.chats, strict=True)):
        found += in_messages(chat, path, index)
    return found


async def inputs_of(
    call: Call,
    incoming: ParsedRequest[Any],
    model: ServedModel,
    *,
    ranges: bool = False,
    role: str | None = None,
) -> Inputs:
    """Return the inputs of a request.

    Args:
        call: the HTTP request.
        incoming: the parsed request.
        model: that it asks.
        ranges: texts tell the characters of each position.
        role: of texts, where the request names none.

    Raises:
        InvalidRequestError: none, several kinds at once, too many, or not valid for the model.
        InlayError: as `ParsedRequest.embeddings`.
    """
    server = call.server
    request: PromptsRequest = incoming.parsed.request
    renderer = await server.renderers.of(model.card)
    rows = await embeddings_of(call, incoming, model.card)
    found = await server.run_prepared(
        incoming.size, _inputs, call, request, model, renderer, rows, role
    )
    return replace(found, ranges=True) if ranges and isinstance(found, TextInputs) else found


def role_fields(request: PromptsRequest) -> dict[str, str | None]:
    """Return the fields of a request that name a role, or a prompt."""
    # Of /pooling a task is what it gives.
    more = ("task",) if isinstance(request, EmbeddingRequest) else ()
    return {name: getattr(request, name) for name in (*_OF_TEXTS, *more)}


def cut_of(call: Call, request: TextsRequest, limit: int) -> Truncation:
    """Return a request's truncation, or the server's where the request has none.

    Raises `InvalidRequestError` beyond the model's length.
    """
    keep = request.truncate_prompt_tokens
    if keep is None and request.auto_truncate is None:
        default = call.server.settings.truncate_prompt_tokens
        keep = None if default is None else min(default, limit)
    elif keep is None and request.auto_truncate:
        keep = -1
    return Truncation.of(keep, request.truncation_side or "right", limit)


def _inputs(
    call: Call,
    request: PromptsRequest,
    model: ServedModel,
    renderer: Renderer,
    embeddings: Embeddings,
    role: str | None,
) -> Inputs:
    """Return the inputs of a request. CPU work."""
    cut = cut_of(call, request, model.max_len)
    has_rows = request.prompt_embeds not in (None, [])
    given = [
        name
        for name, is_given in (
            ("input", request.input not in (None, "", [])),
            ("messages", request.messages is not None),
            ("prompt_embeds", has_rows),
        )
        if is_given
    ]
    if len(given) > 1:
        raise InvalidRequestError(f"give either {' or '.join(given)}", param=given[0])
    chats = request.chats
    if chats or request.messages is not None:
        return _chats(call, request, chats, model, renderer, embeddings, cut)
    for name in _OF_CHATS:
        if getattr(request, name):
            raise InvalidRequestError(
                f"{name} is of chats, and the request has no messages", param=name
            )
    if has_rows:
        _check_no_prompt(request)
        found = [
            Prompt.of(rows)
            for source in in_prompt_embeds(request.prompt_embeds)
            for rows in embeddings.prompts(source)
        ]
        check_count(call, len(found), "prompt_embeds")
        return prompt_inputs(found, cut, [f"prompt_embeds[{n}]" for n in range(len(found))])
    return _texts_or_ids(call, request, model, renderer, cut, role)


def _chats(
    call: Call,
    request: PromptsRequest,
    chats: "Sequence[list[dict[str, Any]]]",
    model: ServedModel,
    renderer: Renderer,
    embeddings: Embeddings,
    cut: Truncation,
) -> Chats:
    param = "input" if request.messages is None else "messages"
    if not chats:
        raise InvalidRequestError(
            f"{param} is a chat, or a list of chats, none of them empty", param=param
        )
    check_count(call, len(chats), param)
    _check_no_prompt(request)
    if embedding_card(model).lower_case:
        raise InvalidRequestError(
            f"the model `{model.name}` lowers its texts, which is not done to chats", param=param
        )
    check_depths(request, param, "chat_template_kwargs")
    return Chats(
        chats,
        request.chat_paths,
        renderer,
        cut,
        embeddings,
        model.card,
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=request.chat_template_kwargs or {},
        special=bool(request.add_special_tokens),
    )


def _texts_or_ids(
    call: Call,
    request: PromptsRequest,
    model: ServedModel,
    renderer: Renderer,
    cut: Truncation,
    role: str | None,
) -> Inputs:
    given = request.input
    if given is None or given in ("", []):
        raise InvalidRequestError("input must be given and must not be empty", param="input")
    check_count(
        call,
        1 if isinstance(given, str) else sum(not isinstance(item, int) for item in given),
        "input",
    )
    texts = [given] if isinstance(given, str) else [item for item in given if isinstance(item, str)]
    if texts and (isinstance(given, str) or len(texts) == len(given)):
        if "" in texts:
            where = "input" if isinstance(given, str) else f"input[{texts.index('')}]"
            raise InvalidRequestError(
                f"{where} is an empty string, which has no embedding", param=where
            )
        card = embedding_card(model)
        part = part_of(role_fields(request), card, model.name, role)
        return TextInputs(
            texts,
            renderer,
            cut,
            prefixes=(part.prefix,),
            form=card.roles.get(part.role or DOCUMENT),
            lower_case=card.lower_case,
            special=request.add_special_tokens is not False,
            params=("input",) if isinstance(given, str) else (),
        )
    _check_no_prompt(request)
    ids = _id_lists(given)
    for index, each in enumerate(ids):
        where = "input" if isinstance(given[0], int) else f"input[{index}]"
        if not each:
            raise InvalidRequestError(f"{where} is empty", param=where)
        check_ids(each, model.card.vocab_size, where)
    prompts = [Prompt.of(Tokens(each)) for each in ids]
    return prompt_inputs(prompts, cut, [f"input[{index}]" for index in range(len(prompts))])


def _id_lists(given: "Sequence[object]") -> list[list[int]]:
    if all(isinstance(item, int) for item in given):
        return [list(given)]  # type: ignore[arg-type]
    if all(isinstance(item, list) and all(isinstance(id_, int) for id_ in item) for item in given):
        return list(given)  # type: ignore[arg-type]
    raise InvalidRequestError(
        "input is a string, a list of strings, a list of token ids, a list of lists of token ids, "
        "a chat, or a list of chats; got a list of several of these",
        param="input",
    )


def prompt_inputs(prompts: list[Prompt], cut: Truncation, params: Sequence[str]) -> PromptInputs:
    """Return ids or rows, truncated, as inputs; `params` has the path of each in the request.

    Raises `InvalidRequestError` for one that is empty, or longer than the model takes.
    """
    lengths = list(map(len, prompts))
    if cut.keep is not None:
        prompts = [cut.cut(prompt) for prompt in prompts]
    for prompt, param in zip(prompts, params, strict=True):
        cut.check(len(prompt), param)
        if not len(prompt):
            raise InvalidRequestError(f"{param} has no positions", param=param.partition("[")[0])
    truncated = [len(prompt) < length for prompt, length in zip(prompts, lengths, strict=True)]
    return PromptInputs(prompts, truncated)


def _check_no_prompt(request: PromptsRequest) -> None:
    for field, value in role_fields(request).items():
        if value is not None:
            raise InvalidRequestError(
                f"{field} says what is put before texts; token ids, chats and prompt_embeds are "
                "taken as they are",
                param=field,
            )
