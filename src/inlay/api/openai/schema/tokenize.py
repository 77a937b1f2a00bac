"""Types of `/tokenize` and `/detokenize`, as vLLM's."""

from typing import Any

import msgspec

from inlay.api.schema.unserved import Unserved


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text (`prompt`) or a chat (`messages`) to tokenize; exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    chat_template: Unserved = None
    media_io_kwargs: Unserved = None
    mm_processor_kwargs: Unserved = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Token ids, and on request `token_strs`: the tokens as the vocabulary spells them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to decode."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The decoded text."""

    prompt: str
