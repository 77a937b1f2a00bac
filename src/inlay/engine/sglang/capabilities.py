"""Limits of SGLang behind inlay.

The models whose prompts may be rows, those that make vectors, and what is refused. No SGLang here.
"""

from inlay.messages.card import Refusal
from inlay.messages.fields import LACKED_BY_SGLANG

TESTED = "0.5.23"
"""The release the table below was made with."""

ROWS_FROM = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose implementation in SGLang takes embeddings as they are, by its source."""

IMAGES_OF = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Model types whose images and rows SGLang was compared with."""

NOT_COMPARED = (
    "SGLang's answers for images of {model_type!r} models were not compared; compared: {compared}"
)
HALVES = "images are not given to an SGLang that does one phase alone"
"""Reasons why images are refused."""

POOLS = {
    "bert": "cls",
    "roberta": "cls",
    "xlm-roberta": "cls",
    "llama": "lasttoken",
    "mistral": "lasttoken",
    "qwen2": "lasttoken",
    "qwen3": "lasttoken",
}
"""SGLang's pooling, by model type, whatever the model's files say."""

NOT_ALONE = (
    "rows are taken by models whose SGLang implementation adds nothing to their embeddings; that "
    "of {model_type!r} is not "
    "known to be one"
)

_OWN_REFUSALS = (
    Refusal("repetition_penalty", "any", "SGLang's sees the output alone, and not the prompt"),
    Refusal("prompt_logprobs", "any", "SGLang does not say how each token ranked"),
    Refusal("bad_words", "any", "SGLang has no such thing"),
    Refusal("allowed_token_ids", "any", "SGLang has no such thing"),
    Refusal("logprob_token_ids", "any", "inlay asks SGLang for the best logprobs alone"),
    Refusal(
        "thinking_token_budget", "any",
        "SGLang ends no thinking without a processor of the client's own",
    ),
    Refusal("min_tokens", "any", "SGLang can only hold back ends that it looks for itself"),
    Refusal(
        "prior_output_with_penalties", "any",
        "SGLang would count the tokens of the other worker as the prompt's",
    ),
)  # fmt: skip

_KNOWN = {refusal.feature for refusal in _OWN_REFUSALS}
REFUSALS = (
    *_OWN_REFUSALS,
    *(
        Refusal(name, "any", "SGLang has no such thing")
        for name in LACKED_BY_SGLANG
        if name not in _KNOWN
    ),
)
"""Features that no request may ask for."""

SEEDED_MIN_P = Refusal(
    "min_p", "any", "SGLang ends when min_p meets --enable-deterministic-inference"
)
"""Likewise, where SGLang draws from seeds."""
