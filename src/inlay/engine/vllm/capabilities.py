"""Limits of vLLM behind inlay.

The models whose prompts may be rows, and what is refused, by version. No vLLM here.

What bare vLLM does with each is in `tests/engines/vllm/test_guards.py`, which shows it and that it
cannot happen here.
"""

from typing import Any

from inlay.messages.card import Refusal
from inlay.messages.fields import LACKED_BY_VLLM

TESTED = "0.32"
"""The release line the table below was made with."""

ROWS_FROM = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "llama",
        "mistral", "mixtral", "olmo2", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    }
)  # fmt: skip
"""Model types whose input is the embeddings of their tokens and nothing else."""

IMAGES_OF = frozenset(
    {
        "glm4v", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3",
        "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm",
    }
)  # fmt: skip
"""Model types whose images and rows vLLM was compared with."""

NOT_COMPARED = (
    "vLLM's answers for images of {model_type!r} models were not compared; compared: {compared}"
)
NOT_THESE = {
    "gemma3": (
        "attention inside an image of this model is bidirectional, and vLLM's on a CPU looks back "
        "alone; on a GPU its answers were not compared"
    ),
    "gemma4": (
        "attention inside an image of the larger ones is bidirectional, and vLLM's on a CPU looks "
        "back alone; of those whose layers share keys, its answers on a CPU to prompts of over 128 "
        "positions are others, texts too; on a GPU its answers were not compared"
    ),
}
"""Model types whose images are refused, with the reason."""


NOT_ALONE = (
    "rows are taken by models whose input is the embeddings of their tokens and nothing else; "
    "vLLM's implementation of "
    "{model_type!r} is not known to be one"
)
NOT_ENABLED = "vLLM was started without --enable-prompt-embeds"
UNGUARDED = (
    "the model is float16, in which bounded rows can overflow, and where vLLM's second model "
    "runner speculates it is not shown that it "
    "tells whose output is not a number"
)
WINDOWED = (
    "the model is float16, in which bounded rows can overflow, and attends within a window: what "
    "is not a number outside of it shows in no "
    "output, and would stay in the cache"
)
ADAPTED_TABLE = (
    "--lora-target-modules names the embedding table, and vLLM then mistakes which position an "
    "adapter belongs to when a "
    "prompt has rows, or ends"
)

_NO_IDS = "rows have no token ids; vLLM itself ends when it is asked"
_AFTER = (
    "vLLM was given a reasoning parser of its own, which says for all requests alike where a "
    "grammar begins"
)
_HOT = "vLLM takes temperatures up to 2"
_PRIOR_GRAMMAR = "vLLM would begin the grammar anew in the middle of the output"
_PRIOR_PENALTIES = "vLLM would count the tokens of the other worker as the prompt's"
_LOOKED_UP_PENALTY = (
    "with vLLM's second model runner, and where it speculates, token 0 stands in the place of "
    "every row, and would be penalised "
    "where nothing should be seen"
)
_MIXED_LOGPROBS = (
    "vLLM's first model runner then gives others of the same step, who ask for logprobs, those "
    "of these ids and not their own"
)
_ADAPTED_IMAGES = (
    "adapters of models that take images are not compared in vLLM, whose towers they may change too"
)
_UNKNOWN_THINKING = (
    "the chat template shows no form of reasoning that is known; start vLLM with "
    "--reasoning-config after --"
)

NO_LEVEL_2 = (
    "level 2 forgets the weights, and vLLM serves on without them unless it is told to load them, "
    "and its adapters, again; level 1 "
    "keeps them in the host's memory"
)
"""Reason why it sleeps at level 1 alone."""


def refusals(
    *,
    ids_are_looked_up: bool,
    own_reasoning: bool,
    mixes_logprobs: bool,
    counts_thinking: bool,
    takes_images: bool = False,
) -> tuple[Refusal, ...]:
    """The refusals of the card.

    Args:
        ids_are_looked_up: a token must stand in the place of a row: with vLLM's second
            model runner, which GPUs get, and where it speculates.
        own_reasoning: the user has set where vLLM's grammars begin.
        mixes_logprobs: named ids of one request reach others too, as by vLLM's first
            model runner.
        counts_thinking: vLLM knows where thinking begins and ends.
        takes_images: rows are items of their own, whose place has the id of an image.
    """
    penalised = ids_are_looked_up and not takes_images
    always = (
        Refusal("prompt_logprobs", "rows", _NO_IDS),
        Refusal("temperature_above_2", "any", _HOT),
        Refusal("prior_output_with_grammar", "any", _PRIOR_GRAMMAR),
        Refusal("prior_output_with_penalties", "any", _PRIOR_PENALTIES),
        *(Refusal(name, "any", "vLLM has no such thing") for name in LACKED_BY_VLLM),
    )
    return (
        *always,
        *([Refusal("grammar_after", "any", _AFTER)] if own_reasoning else []),
        *([Refusal("logprob_token_ids", "any", _MIXED_LOGPROBS)] if mixes_logprobs else []),
        *([] if counts_thinking else [Refusal("thinking_token_budget", "any", _UNKNOWN_THINKING)]),
        *([Refusal("repetition_penalty", "rows", _LOOKED_UP_PENALTY)] if penalised else []),
        *([Refusal("adapter", "rows", _ADAPTED_IMAGES)] if takes_images else []),
    )


def ids_are_looked_up(config: Any) -> bool:
    """Return True if the ids in the place of rows must be a token's.

    vLLM's second model runner, which a GPU gets, looks all ids up before it puts rows over them. So
    does what drafts tokens by the model (multi-token prediction, EAGLE), which knows of no rows;
    and what finds drafts in the prompt proposes them as tokens.
    """
    return bool(config.use_v2_model_runner) or config.speculative_config is not None


def rows_refused(
    config: Any, model_config: dict[str, Any], *, takes_images: bool = False
) -> str | None:
    """Return the reason why this model, so started, takes no rows; None where it does.

    `takes_images`: rows are items of their own, for which vLLM needs no flag.
    """
    model_type = model_config.get("model_type")
    if model_type not in ROWS_FROM and not takes_images:
        return NOT_ALONE.format(model_type=model_type)
    if not takes_images and not config.model_config.enable_prompt_embeds:
        return NOT_ENABLED
    targets = None if config.lora_config is None else config.lora_config.target_modules
    if config.lora_config is not None and (
        targets is None or any("embed" in name for name in targets)
    ):
        return ADAPTED_TABLE
    half = str(config.model_config.dtype) == "torch.float16"
    if half and config.speculative_config is not None and config.use_v2_model_runner:
        return UNGUARDED
    if half and config.model_config.get_sliding_window() is not None:
        return WINDOWED
    return None
