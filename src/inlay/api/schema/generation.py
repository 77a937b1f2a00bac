"""Fields of every request that generates, under OpenAI's and vLLM's names."""

from typing import Any, ClassVar, Literal

import msgspec

from inlay.api.schema.unserved import Unserved


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream: usage in the last event, or in each.

    Attributes:
        include_usage: a last event has the usage of all choices; false when absent.
        continuous_usage_stats: with it, each event has the usage of its choice so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields of a request that generates. Names beyond OpenAI's are vLLM's.

    Attributes:
        model: served name; the only model served when absent.
        seed: choice `i` samples with `seed + i`; a random seed for each choice when absent.
        cache_salt: prompts share cached prefixes only under equal salts.
        prompt_cache_key: requests with the same key go to the same worker where possible.
        session_id: the same under vLLM's name; it takes precedence.
        request_id: the answer's `id`, behind its prefix.
        priority: lower values are served first; only with --scheduling-policy priority.
        echo: return the prompt before the output; completions only.
        best_of: outputs of a completion that are generated, of which the best `n` are returned.
        prompt_logprobs: alternatives for each prompt token; true is 1 and false 0, as in vLLM.
        truncate_prompt_tokens: positions of a prompt that are kept; -1 keeps as many as leave
            room for the output.
        truncation_side: "left" (when absent) keeps the last positions, "right" the first.
        response_format: OpenAI's: type "text", "json_object", or "json_schema" with `json_schema:
            {name, schema, strict}`.
        structured_outputs: vLLM's: one of json, regex, choice, grammar, json_object.
        logprob_token_ids: ids whose logprobs are returned instead of the most likely ids'.
        return_tokens_as_token_ids: name tokens in logprobs "token_id:ID" instead of by text.
        spaces_between_special_tokens: false leaves out the spaces that the tokenizer puts between
            special tokens that are shown.
        thinking_token_budget: number of reasoning tokens after which it is ended; -1 for no limit.
        bad_words: texts that the output must not contain.
        allowed_token_ids: the only ids that may be sampled.
        n: choices for each prompt; 1 when absent.
        stream: answer with server-sent events; false when absent.
        stream_options: what a stream says of usage; only with `stream`.
        max_tokens: output tokens at most; when absent 16 for a completion, and what the context
            leaves for a chat.
        min_tokens: output tokens before an end token may come; 0 when absent.
        temperature: 0 is greedy; when absent the model's generation config, else 1.
        top_p: probability mass that is sampled from; when absent the model's generation config,
            else 1.
        top_k: number of the likeliest tokens that are sampled from; 0 or -1 is all.
        min_p: least probability of a sampled token, as a share of the likeliest's; 0 when absent.
        repetition_penalty: factor against tokens of prompt and output; 1 when absent.
        presence_penalty: what a token's logit loses once it is in the output; -2 to 2, 0 when
            absent.
        frequency_penalty: the same for each time that it is there; -2 to 2, 0 when absent.
        stop: strings at which the answer ends, before their first match; at most 64.
        stop_token_ids: ids that end the output, at most 1024.
        include_stop_str_in_output: keep the stop string in the answer; false when absent.
        ignore_eos: go on behind the model's own end tokens; false when absent.
        skip_special_tokens: leave special tokens out of the text; true when absent.
        logit_bias: token id to what is added to its logit, -100 to 100.
        return_token_ids: add the ids of the answer, and of a prompt without embeddings.
        add_special_tokens: put the tokenizer's special tokens before a text; true for a completion,
            false for a chat when absent.
        user: accepted; nothing depends on it.
    """

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
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
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    priority: int | None = None
    response_format: Any = None
    prompt_logprobs: int | bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    structured_outputs: Any = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None

    ebnf: Unserved = None
    ec_transfer_params: Unserved = None
    guided_choice: Unserved = None
    guided_grammar: Unserved = None
    guided_json: Unserved = None
    guided_regex: Unserved = None
    json_schema: Unserved = None
    kv_transfer_params: Unserved = None
    length_penalty: Unserved = None
    media_io_kwargs: Unserved = None
    mm_payload: Unserved = None
    mm_processor_kwargs: Unserved = None
    regex: Unserved = None
    repetition_detection: Unserved = None
    return_mm_kwargs: Unserved = None
    return_prompt_text: Unserved = None
    return_token_offsets: Unserved = None
    routed_experts_prompt_start: Unserved = None
    stream_interval: Unserved = None
    use_beam_search: Unserved = None
    vllm_xargs: Unserved = None
    watermarking: Unserved = None

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None
    """Default of `max_tokens`.

    None is the rest of the context.
    """

    @property
    def candidates(self) -> int:
        """Outputs generated for each prompt."""
        return self.n or 1

    @property
    def only_echoes(self) -> bool:
        """True if no token is to be generated: the answer is the prompt."""
        return False


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """Logprob of one token at one prompt position; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str
