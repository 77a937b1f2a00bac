"""Checks of a request to `/v1/responses`, before it is translated to a chat."""

from inlay.api.fields import check_depth, check_depths, check_unserved
from inlay.api.openai.schema.responses import ELSEWHERE, ResponsesRequest
from inlay.errors import InvalidRequestError

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_FREE_FORM = ("input", "tools", "tool_choice", "chat_template_kwargs", "structured_outputs")

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512


def check_responses(request: ResponsesRequest) -> None:
    """Raise `InvalidRequestError` for a field that is not served, with the alternative."""
    _check_elsewhere(request)
    check_unserved(request)
    check_depths(request, *_FREE_FORM)
    if request.text is not None:
        check_depth(request.text.format, "text.format")
        if request.text.verbosity not in (None, "medium"):
            raise InvalidRequestError(
                f"text.verbosity must be 'medium', got {request.text.verbosity[:40]!r}: models "
                "here have no such setting",
                param="text.verbosity",
            )
    if request.truncation not in (None, "disabled"):
        raise InvalidRequestError(
            f"truncation must be 'disabled', got {request.truncation[:40]!r}: no item is ever "
            "dropped from the input",
            param="truncation",
        )
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise InvalidRequestError(
            f"max_output_tokens must be at least 1, got {request.max_output_tokens}",
            param="max_output_tokens",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    _check_include(request)
    _check_metadata(request.metadata or {})


def _check_elsewhere(request: ResponsesRequest) -> None:
    for name, here in ELSEWHERE.items():
        if getattr(request, name) is not None:
            raise InvalidRequestError(
                f"{name} is a field of chat completions; in responses it is {here}", param=name
            )
    if request.n not in (None, 1):
        raise InvalidRequestError(
            f"n must be 1, got {request.n}: a response has one answer", param="n"
        )


def _check_include(request: ResponsesRequest) -> None:
    for name in request.include or ():
        if name not in _INCLUDABLE:
            raise InvalidRequestError(
                f"include may hold {', '.join(_INCLUDABLE)}; got {name[:80]!r}", param="include"
            )
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise InvalidRequestError(
            f"top_logprobs is only allowed when include has {LOGPROBS!r}", param="top_logprobs"
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata has {len(metadata)} entries; at most {MAX_METADATA}", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise InvalidRequestError(
                f"metadata: a key may have {MAX_KEY} characters and a value {MAX_VALUE}, got "
                f"{len(key)} and {len(value)}",
                param="metadata",
            )
