"""Scores and probabilities from the logits of a classification head."""

from collections.abc import Callable

import numpy as np

from inlay.api.openai.embeddings.gathering import Array


def _softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Array = exponentials / exponentials.sum(axis=1, keepdims=True)
    return found


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda logits: logits,
    "tanh": np.tanh,
    # Written so that no exponential overflows.
    "sigmoid": lambda logits: 0.5 * (1 + np.tanh(0.5 * logits)),
    "softmax": _softmax,
}
"""Activations by the names of `EmbeddingCard.activation`; float32 [inputs, labels] to the same."""


def activated(logits: Array, activation: str, use_activation: bool | None) -> Array:
    """Return `logits` [inputs, labels], activated unless `use_activation` is False."""
    return logits if use_activation is False else ACTIVATIONS[activation](logits)
