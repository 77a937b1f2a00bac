"""Properties of an embedding model that do not depend on the engine that runs it.

Pooling, maximum length, metadata and identity.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig, PoolingMode, activation_of
from inlay.engine.embed.families import PoolingFamily
from inlay.engine.settings import EngineSettings
from inlay.engine.weights import weights_id
from inlay.messages.card import EmbeddingCard

_logger = logging.getLogger(__name__)

_SCORES = "ForSequenceClassification"


def check_task(stored: Mapping[str, Any], family: PoolingFamily | None, task: str) -> None:
    """Check a checkpoint's `config.json` against the requested task.

    Raises:
        InvalidRequestError: embeddings of a cross-encoder, or scores of anything else.
    """
    names = [str(name) for name in stored.get("architectures") or ()]
    classifies = any(name.endswith(_SCORES) for name in names)
    if task == "score" and not (classifies and (family is None or family.scores)):
        raise InvalidRequestError(
            f"the checkpoint holds {', '.join(names) or 'no known head'}; --task score serves "
            f"classification heads: encoders whose architecture ends with {_SCORES}"
        )
    if task != "score" and classifies:
        raise InvalidRequestError(
            f"the checkpoint holds {', '.join(names)}, which scores or classifies and makes no "
            "embeddings: start it with --task score"
        )


def first_position(family: PoolingFamily, config: Any) -> int:
    """Return the position id of a prompt's first token; `config` is transformers' own."""
    if family.position_offset is not None:
        return family.position_offset
    first: int = config.pad_token_id + 1
    return first


def max_model_len(asked: int | None, config: EmbeddingConfig, model: Any, first: int) -> int:
    """Return the maximum number of positions of a prompt; `model` is transformers' configuration.

    Raises `InvalidRequestError` if more are `asked`.
    """
    own = int(model.max_position_embeddings) - first
    if asked is not None and asked > own:
        raise InvalidRequestError(
            f"max_model_len is {asked}; the model's maximum context length is {own}"
        )
    return asked or min(own, config.max_length or own)


def pooling_modes(
    settings: EngineSettings,
    config: EmbeddingConfig,
    family: PoolingFamily | None,
    model: Any = None,
) -> tuple[PoolingMode, ...]:
    """Return the pooling modes whose results are concatenated; `model` as for `max_model_len`.

    Raises:
        InvalidRequestError: neither settings nor files name one, and the `family` is unknown.
    """
    if settings.task == "score":
        # ModernBERT's heads say which; all others read the first state.
        return ("mean",) if getattr(model, "classifier_pooling", "cls") == "mean" else ("cls",)
    if settings.pooling != "auto":
        return (settings.pooling,)
    if config.pooling is not None:
        return config.pooling
    if family is None:
        raise InvalidRequestError(
            "the model does not say how its states are pooled: say it with --pooling",
            param="pooling",
        )
    mode: PoolingMode = "lasttoken" if family.causal else "mean"
    _logger.warning("the model does not say how its states are pooled; taking %r (--pooling)", mode)
    return (mode,)


def card_of(
    settings: EngineSettings, config: EmbeddingConfig, model: Any, modes: Sequence[PoolingMode]
) -> EmbeddingCard:
    """Describe the model's vectors or scores for clients.

    Raises:
        InvalidRequestError: dimensions larger than the vectors.
    """
    if settings.task == "score":
        return _scoring_card(model)
    size = config.dense[-1].out_features if config.dense else int(model.hidden_size) * len(modes)
    allowed = settings.matryoshka_dimensions or getattr(model, "matryoshka_dimensions", None) or ()
    if any(not 0 < each <= size for each in allowed):
        raise InvalidRequestError(
            f"vectors have {size} elements; matryoshka_dimensions are {list(allowed)}"
        )
    return EmbeddingCard(
        size=size,
        normalize=config.normalize,
        any_dimensions=bool(getattr(model, "is_matryoshka", False)) and not allowed,
        dimensions=tuple(sorted(allowed)),
        prompts=config.prompts,
        default_prompt=config.default_prompt,
        lower_case=config.lower_case,
    )


def _scoring_card(config: Any) -> EmbeddingCard:
    """Describe a scoring model: its labels, and the activation after its logits."""
    size = int(config.num_labels)
    names = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    labels = tuple(names[index] for index in range(size)) if set(range(size)) <= set(names) else ()
    return EmbeddingCard(
        size=size, normalize=False, activation=_activation(config, size), labels=labels
    )


_BY_PROBLEM = {"regression": "identity", "multi_label_classification": "sigmoid"}


def _activation(config: Any, labels: int) -> str:
    """Choose the activation after the logits, as vLLM's `get_act_fn` does.

    By the kind of problem, else the activation that sentence-transformers' `CrossEncoder` reads,
    else probabilities.

    Raises:
        InvalidRequestError: the model names an unsupported one.
    """
    probabilities = "sigmoid" if labels == 1 else "softmax"
    problem = getattr(config, "problem_type", None)
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    if problem in _BY_PROBLEM:
        return _BY_PROBLEM[problem]
    if problem == "single_label_classification" or named is None:
        return probabilities
    if named == "torch.nn.modules.activation.Softmax":
        return probabilities
    found = activation_of(named, Path(config.name_or_path))
    if found not in ("identity", "sigmoid", "tanh"):
        raise InvalidRequestError(
            f"the model's scores end with {named}, which is not served; served: Identity, Sigmoid, "
            "Softmax, Tanh"
        )
    # As in vLLM, a sigmoid of several labels is their softmax.
    return probabilities if found == "sigmoid" else found


def identity(config: EmbeddingConfig, modes: Sequence[PoolingMode], *, unit: bool = False) -> str:
    """Return 32 hex digits that identify everything that determines a vector.

    `unit` if the engine normalises vectors whatever the model says.
    """
    hasher = blake3(weights_id(config.directory).encode())
    hasher.update(",".join(modes).encode())
    for layer in config.dense:
        hasher.update(f"{weights_id(layer.directory)} {layer.activation}".encode())
    if unit:
        hasher.update(b"unit")
    return hasher.digest(16).hex()
