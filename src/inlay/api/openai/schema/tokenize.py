"""Types of `/tokenize` and `/detokenize`, as vLLM's."""

from typing import Annotated, Any

import msgspec

from inlay.api.schema.described import CHAT, FUNCTION, QUESTION
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import example, field


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text (`prompt`) or a chat (`messages`) to tokenize; exactly one of them.

    Attributes:
        model: served name; the first model when absent.
        prompt: a text.
        messages: a chat of texts: embeddings and media have no tokens to show.
        add_special_tokens: put the tokenizer's special tokens around a text (true when absent), or
            around a chat, on top of its template's (false when absent).
        add_generation_prompt: end the chat where the answer begins; true when absent, unless
            `continue_final_message` is, which it excludes.
        continue_final_message: end the chat where the content of its last message ends; false when
            absent.
        return_token_strs: add the tokens as the vocabulary spells them; false when absent.
        chat_template_kwargs: variables for the chat template.
        tools: functions that the template is told of.
    """

    model: str | None = None
    prompt: Annotated[str | None, example(QUESTION)] = None
    messages: Annotated[list[dict[str, Any]] | None, example(CHAT)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, example({"enable_thinking": False})] = (
        None
    )
    tools: Annotated[
        list[dict[str, Any]] | None, example([{"type": "function", "function": FUNCTION}])
    ] = None

    chat_template: Unserved = None
    media_io_kwargs: Unserved = None
    mm_processor_kwargs: Unserved = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Token ids, and on request `token_strs`: the tokens as the vocabulary spells them."""

    count: Annotated[int, field("number of tokens.", 2)]
    max_model_len: Annotated[int, field("positions of prompt and answer together.", 4096)]
    tokens: Annotated[list[int], field("ids of the tokens.", [1, 887])]
    token_strs: Annotated[
        list[str] | None,
        field("tokens as the vocabulary spells them; null unless asked for.", ["▁The"]),
    ] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to decode.

    Attributes:
        model: served name; the first model when absent.
        tokens: ids of the model's vocabulary, at most as many as its context has positions.
    """

    model: str | None = None
    tokens: Annotated[list[int], example([1, 2, 3])]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The decoded text."""

    prompt: Annotated[str, field("the decoded text.", "The capital")]
