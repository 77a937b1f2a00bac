"""Fields of every request that generates, under OpenAI's and vLLM's names."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from inlay.api.schema.described import SCHEMA, Logprob, TokenText
from inlay.api.schema.hidden_states import HiddenStatesOptions
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import Bounds, SamplingFields, field


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream: usage in the last event, or in each.

    Attributes:
        include_usage: a last event has the usage of all choices; false when absent.
        continuous_usage_stats: with `include_usage`, each event has the usage of its choice so far;
            false when absent.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(SamplingFields, kw_only=True):
    """Fields that requests for chats, completions and responses have in common."""

    model: Annotated[
        str | None,
        field("served name; when absent the first model that fits the route.", "my-model"),
    ] = None
    prompt_cache_key: Annotated[
        str | None,
        field(
            "requests with the same key go to the same worker where possible; 1 to 512 characters.",
            "my-chat-1",
        ),
    ] = None
    stream: Annotated[bool | None, field("answer with server-sent events; false when absent.")] = (
        None
    )
    user: Annotated[str | None, field("accepted; nothing depends on it.", "somebody")] = None
    seed: Annotated[
        int | None,
        field(
            "choice `i` samples with `seed + i`; a random seed for each choice when absent or -1. "
            "Refused where the engine draws without one, unless `temperature` is 0.",
            1,
            bounds=Bounds(-(2**63), 2**63 - 1),
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        field(
            "strings at which the answer ends, before their first match; at most 64, of 4,096 "
            "characters each and 16,384 together.",
            ["\n\n"],
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        field("ids that end the output, at most 1024; also with `ignore_eos`.", [2]),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        field(
            "keep the stop string in the answer, or the text of the token that ended it; false "
            "when absent."
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, field("leave special tokens out of the text; true when absent.")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        field(
            "false leaves out the spaces that the tokenizer puts between special tokens that are "
            "shown; true when absent."
        ),
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        field("what is added to the logits of token ids, -100 to 100; at most 1024.", {"2": -100}),
    ] = None
    cache_salt: Annotated[
        str | None,
        field(
            "prompts share cached prefixes only under equal salts; not empty.",
            "a secret of this user's",
        ),
    ] = None
    session_id: Annotated[
        str | None,
        field(
            "requests with the same one go to the same worker where possible, 1 to 512 "
            "characters; vLLM's name, which takes precedence over `prompt_cache_key`.",
            "my-chat-1",
        ),
    ] = None
    request_id: Annotated[
        str | None,
        field(
            "the answer's `id`, behind its prefix: 1 to 128 visible ASCII characters; random when "
            "absent.",
            "my-request-1",
        ),
    ] = None
    priority: Annotated[
        int | None,
        field(
            "lower values are served first, 0 when absent; others only with --scheduling-policy "
            "priority.",
            1,
            bounds=Bounds(-(2**31), 2**31 - 1),
        ),
    ] = None
    structured_outputs: Annotated[
        Any,
        field(
            "vLLM's: an object with one of json, regex, choice, grammar, json_object, as far as "
            "the engine has them; not beside a `response_format` that is not text.",
            {"choice": ["yes", "no"]},
        ),
    ] = None
    n: Annotated[
        int | None,
        field(
            "choices for each prompt; 1 when absent. All choices together are bounded by "
            "--max-choices.",
            1,
            bounds=Bounds(1),
        ),
    ] = None

    hidden_states: Annotated[
        HiddenStatesOptions | None,
        field(
            "the model's hidden states, in the answer or stored; needs --enable-hidden-states.",
            {"layers": [-1], "of": "last"},
        ),
    ] = None
    return_hidden_states: Annotated[
        bool | Literal["last"] | None,
        field(
            "SGLang's: `hidden_states` is a list of numbers, the state behind the last norm from "
            "which the last token was chosen; false when absent."
        ),
    ] = None

    ec_transfer_params: Unserved = None
    kv_transfer_params: Unserved = None
    media_io_kwargs: Unserved = None
    mm_payload: Unserved = None
    mm_processor_kwargs: Unserved = None
    return_mm_kwargs: Unserved = None
    vllm_xargs: Unserved = None
    watermarking: Unserved = None


class GenerationRequest(RequestFields, kw_only=True):
    """Fields of a request that generates. Names beyond OpenAI's are vLLM's."""

    stream_options: Annotated[
        StreamOptions | None,
        field("usage in a stream; only with `stream`.", {"include_usage": True}),
    ] = None
    best_of: Annotated[
        int | None,
        field(
            "outputs of a completion that are generated, of which the best `n` are returned.",
            4,
            bounds=Bounds(1),
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        field(
            "output tokens at most, 1 or more; what the context leaves when absent.",
            64,
            bounds=Bounds(1),
        ),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        field(
            "ids whose logprobs are returned instead of the most likely ids', at most 128; only "
            "where logprobs are asked for.",
            [1, 2],
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None,
        field(
            "add the ids of the answer, and of a prompt without embeddings and media; false when "
            "absent."
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None,
        field('name tokens in logprobs "token_id:ID" instead of by text; false when absent.'),
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        field(
            "number of reasoning tokens after which it is ended, of a model that writes it "
            "between two tags; -1 for no limit, as when absent.",
            128,
            bounds=Bounds(-1),
        ),
    ] = None
    echo: Annotated[
        bool | None,
        field(
            "return the prompt before the output; false when absent. Not with embeddings or media.",
            True,
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        field(
            "put the tokenizer's special tokens before a text; true for a completion, false for a "
            "chat when absent."
        ),
    ] = None
    response_format: Annotated[
        Any,
        field(
            'OpenAI\'s: an object of type "text" (as when absent), "json_object", or '
            '"json_schema" with `json_schema: {name, schema, strict}`, held to in full, or with '
            "`strict: false` as far as possible.",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | bool | None,
        field(
            "alternatives for each prompt token, 0 to --max-logprobs; true is 1 and false 0, as "
            "in vLLM. Not in a stream, not with embeddings or media."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        field(
            "positions of a prompt that are kept, rows and images included, 1 to the model's "
            "context; -1 keeps as many as leave room for the output. When absent a longer prompt "
            "is refused.",
            512,
            bounds=Bounds(-1),
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        field('"left" (when absent) keeps the last positions, "right" the first.'),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        field(
            "texts that the output must not contain: at most 128, 4,096 characters and 1,024 "
            "tokens together.",
            ["perhaps"],
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        field("the only ids that may be sampled, end tokens included; not empty.", [1, 2, 3]),
    ] = None

    return_weight_versions: Annotated[
        bool | None,
        field("show the identity of the weights that made each choice, as `weight_versions`."),
    ] = None

    ebnf: Unserved = None
    guided_choice: Unserved = None
    guided_grammar: Unserved = None
    guided_json: Unserved = None
    guided_regex: Unserved = None
    input_embeds: Unserved = None
    inputs_embeds: Unserved = None
    json_schema: Unserved = None
    length_penalty: Unserved = None
    regex: Unserved = None
    repetition_detection: Unserved = None
    return_prompt_text: Unserved = None
    return_token_offsets: Unserved = None
    routed_experts_prompt_start: Unserved = None
    stream_interval: Unserved = None
    use_beam_search: Unserved = None

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None
    """Default of `max_tokens`.

    None is the rest of the context.
    """
    PICKS_BEST: ClassVar[bool] = False
    """True if `best_of` may be more than `n`."""

    @property
    def only_reads(self) -> bool:
        """True if no token is to be generated: the prompt alone is of interest."""
        asked = self.hidden_states
        return self.max_tokens == 0 and asked is not None and asked.of not in ("output", "all")


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """Logprob of one token at one prompt position; `rank` 1 is the most likely."""

    logprob: Logprob
    rank: Annotated[int, field("1 for the likeliest token at this position.", 1)]
    decoded_token: TokenText
