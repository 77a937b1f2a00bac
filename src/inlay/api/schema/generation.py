"""Fields of every request that generates, under OpenAI's and vLLM's names."""

from typing import Any, ClassVar, Literal

import msgspec

from inlay.api.schema.unserved import Unserved


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream: usage in the last event, or in each.

    Attributes:
        include_usage: a last event has the usage of all choices; false when absent.
        continuous_usage_stats: with `include_usage`, each event has the usage of its choice so far;
            false when absent.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields that requests for chats, completions and responses have in common.

    `GenerationRequest` says what they mean.
    """

    model: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    priority: int | None = None
    structured_outputs: Any = None
    n: int | None = None

    ec_transfer_params: Unserved = None
    kv_transfer_params: Unserved = None
    media_io_kwargs: Unserved = None
    mm_payload: Unserved = None
    mm_processor_kwargs: Unserved = None
    return_mm_kwargs: Unserved = None
    vllm_xargs: Unserved = None
    watermarking: Unserved = None


class GenerationRequest(RequestFields, kw_only=True):
    """Fields of a request that generates. Names beyond OpenAI's are vLLM's.

    Attributes:
        model: served name; when absent the first model that fits the route.
        seed: choice `i` samples with `seed + i`; a random seed for each choice when absent or -1.
            Refused where the engine draws without one, unless `temperature` is 0.
        cache_salt: prompts share cached prefixes only under equal salts; not empty.
        prompt_cache_key: requests with the same key go to the same worker where possible; 1 to 512
            characters.
        session_id: requests with the same one go to the same worker where possible, 1 to 512
            characters; vLLM's name, which takes precedence over `prompt_cache_key`.
        request_id: the answer's `id`, behind its prefix: 1 to 128 visible ASCII characters; random
            when absent.
        priority: lower values are served first, 0 when absent; others only with --scheduling-policy
            priority.
        echo: return the prompt before the output; false when absent. Not with embeddings or media.
        best_of: outputs of a completion that are generated, of which the best `n` are returned.
        prompt_logprobs: alternatives for each prompt token, 0 to --max-logprobs; true is 1 and
            false 0, as in vLLM. Not in a stream, not with embeddings or media.
        truncate_prompt_tokens: positions of a prompt that are kept, rows and images included, 1 to
            the model's context; -1 keeps as many as leave room for the output. When absent a longer
            prompt is refused.
        truncation_side: "left" (when absent) keeps the last positions, "right" the first.
        response_format: OpenAI's: an object of type "text" (as when absent), "json_object", or
            "json_schema" with `json_schema: {name, schema, strict}`, held to in full, or with
            `strict: false` as far as possible.
        structured_outputs: vLLM's: an object with one of json, regex, choice, grammar, json_object,
            as far as the engine has them; not beside a `response_format` that is not text.
        logprob_token_ids: ids whose logprobs are returned instead of the most likely ids', at most
            128; only where logprobs are asked for.
        return_tokens_as_token_ids: name tokens in logprobs "token_id:ID" instead of by text; false
            when absent.
        spaces_between_special_tokens: false leaves out the spaces that the tokenizer puts between
            special tokens that are shown; true when absent.
        thinking_token_budget: number of reasoning tokens after which it is ended, of a model that
            writes it between two tags; -1 for no limit, as when absent.
        bad_words: texts that the output must not contain: at most 128, 4,096 characters and 1,024
            tokens together.
        allowed_token_ids: the only ids that may be sampled, end tokens included; not empty.
        n: choices for each prompt; 1 when absent. All choices together are bounded by
            --max-choices.
        stream: answer with server-sent events; false when absent.
        stream_options: what a stream says of usage; only with `stream`.
        max_tokens: output tokens at most, 1 or more; what the context leaves when absent.
        min_tokens: output tokens before an end token, a stop token or a stop string ends it; 0 when
            absent, at most the output's limit.
        temperature: 0 or more, 0 is greedy; when absent the model's generation config, else 1.
        top_p: probability mass that is sampled from, above 0 and at most 1; when absent the model's
            generation config, else 1.
        top_k: number of the likeliest tokens that are sampled from, 0 or -1 for all; when absent
            the model's generation config, else all.
        min_p: least probability of a sampled token, as a share of the likeliest's, 0 to 1; when
            absent the model's generation config, else 0.
        repetition_penalty: factor above 0 against tokens of prompt and output; when absent the
            model's generation config, else 1. Rows of embeddings are not seen.
        presence_penalty: what a token's logit loses once it is in the output; -2 to 2, 0 when
            absent.
        frequency_penalty: what a token's logit loses for each time that it is in the output; -2 to
            2, 0 when absent.
        stop: strings at which the answer ends, before their first match; at most 64, of 4,096
            characters each and 16,384 together.
        stop_token_ids: ids that end the output, at most 1024; also with `ignore_eos`.
        include_stop_str_in_output: keep the stop string in the answer, or the text of the token
            that ended it; false when absent.
        ignore_eos: go on behind the model's own end tokens; false when absent.
        skip_special_tokens: leave special tokens out of the text; true when absent.
        logit_bias: token id to what is added to its logit, -100 to 100; at most 1024 ids.
        return_token_ids: add the ids of the answer, and of a prompt without embeddings and media;
            false when absent.
        add_special_tokens: put the tokenizer's special tokens before a text; true for a completion,
            false for a chat when absent.
        user: accepted; nothing depends on it.
    """

    stream_options: StreamOptions | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    response_format: Any = None
    prompt_logprobs: int | bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None

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
    return_weight_versions: Unserved = None
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
    def only_echoes(self) -> bool:
        """True if no token is to be generated: the answer is the prompt."""
        return False


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """Logprob of one token at one prompt position; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str
