"""Settings with which the likeliest token is the next one."""

from inlay.messages.request import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


def is_greedy(sampling: Sampling) -> bool:
    """Return True if tokens are not drawn."""
    return sampling.temperature < GREEDY_BELOW


def penalises(sampling: Sampling) -> bool:
    """Return True if logits depend on the tokens before them."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def is_plain(sampling: Sampling) -> bool:
    """Return True if greedy choice from the model's logits is enough after `min_tokens`."""
    return (
        is_greedy(sampling)
        and sampling.logprobs is None
        and not (penalises(sampling) or sampling.logit_bias or sampling.bad_words)
        and sampling.allowed_token_ids is None
        and sampling.thinking is None
        and sampling.grammar is None
    )
