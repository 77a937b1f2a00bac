"""Properties of an embedding model that do not depend on the engine that runs it.

Pooling, maximum length, metadata and identity.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig
from inlay.embedding.files import activation_of
from inlay.embedding.plan import OutputPlan
from inlay.embedding.static import static_weights
from inlay.engine.embed.families import PoolingFamily
from inlay.engine.embed.pooling import pickled_files
from inlay.engine.sections import PoolingOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.weights import weights_id
from inlay.messages.card import EmbeddingCard
from inlay.messages.pooling import OutputCard
from inlay.tensors.weight_files import find_weights

_logger = logging.getLogger(__name__)

_SCORES = "ForSequenceClassification"


def check_task(
    stored: Mapping[str, Any],
    family: PoolingFamily | None,
    task: str,
    outputs: Sequence[OutputPlan],
    *,
    decoders: bool = False,
) -> None:
    """Check a checkpoint's `config.json` against the requested task.

    Args:
        stored: the file.
        family: of the model; None where it is unknown.
        task: "embed" or "score".
        outputs: that the files, or settings, name.
        decoders: the engine scores with decoders.

    Raises:
        InvalidRequestError: embeddings of a cross-encoder, or scores of anything else.
    """
    names = [str(name) for name in stored.get("architectures") or ()]
    classifies = any(name.endswith(_SCORES) for name in names)
    words = any(each.words for each in outputs)
    if task == "score" and words:
        if family is None or not family.causal or not family.scores or not decoders:
            raise InvalidRequestError(
                "scores by the logits of words (LogitScore, --score-tokens) are served of decoders "
                "of text, by the torch engine",
                param="score_tokens",
            )
        if classifies:
            raise InvalidRequestError(
                f"the checkpoint holds {', '.join(names)}, which has a head of its own: it takes "
                "no --score-tokens",
                param="score_tokens",
            )
        return
    if words:
        raise InvalidRequestError(
            "the checkpoint scores by the logits of words (LogitScore) and makes no embeddings: "
            "start it with --task score",
            param="task",
        )
    serves = family is None or family.scores
    if task == "score" and classifies and serves and not decoders and family and family.causal:
        raise InvalidRequestError(
            f"the checkpoint holds {', '.join(names)}; the head of a decoder is served by the "
            "torch engine (--engine torch)",
            param="engine",
        )
    if task == "score" and not (classifies and serves):
        raise InvalidRequestError(
            f"the checkpoint holds {', '.join(names) or 'no known head'}; --task score serves "
            f"classification heads, whose architecture ends with {_SCORES}, and with the torch "
            "engine decoders that say yes or no (--score-tokens no,yes)"
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


def outputs_of(
    settings: EngineSettings,
    config: EmbeddingConfig,
    family: PoolingFamily | None,
    model: Any = None,
) -> tuple[OutputPlan, ...]:
    """Return what the model gives, the first unless a request says otherwise.

    `model` is as for `max_model_len`.

    Raises:
        InvalidRequestError: `settings` name an output that it has not, neither they nor the files
            say how states are pooled and the `family` is unknown, or its head is not served.
    """
    if settings.model.task == "score":
        words = next((each for each in config.outputs if each.words), None)
        if words is not None:
            return (words,)
        if family is not None and family.causal:
            return (OutputPlan("labels", source="classes", select=("lasttoken",)),)
        # ModernBERT's heads say which; all others read the first state.
        mean = getattr(model, "classifier_pooling", "cls") == "mean"
        return (OutputPlan("labels", source="classes", select=("mean" if mean else "cls",)),)
    if config.guess is not None and not settings.pooling.outputs:
        _logger.warning("%s: %s", config.directory, config.guess)
    chosen = chosen_outputs(settings.pooling, config)
    others = [each.name for each in chosen if each.source != "states"]
    if others and (family is None or family.causal):
        raise InvalidRequestError(
            f"{' and '.join(others)} are served of encoders, and this model is a decoder, or not "
            "known"
        )
    return tuple(
        replace(each, select=_modes(settings.pooling, each.select, family))
        if each.name == "dense"
        else each
        for each in chosen
    )


def chosen_outputs(options: PoolingOptions, config: EmbeddingConfig) -> list[OutputPlan]:
    """Return the outputs of the files, or of them those that `settings` name, in their order.

    Raises:
        InvalidRequestError: `settings` name one that the files have not.
    """
    known = {each.name: each for each in config.outputs}
    unknown = next((name for name in options.outputs if name not in known), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"the model gives {', '.join(known)}; --outputs names {unknown!r}", param="outputs"
        )
    return [known[name] for name in dict.fromkeys(options.outputs or known)]


def dense_of(
    settings: EngineSettings, config: EmbeddingConfig, family: PoolingFamily | None
) -> OutputPlan:
    """Return the one output of an engine that makes no others. Raises as `outputs_of`.

    Raises:
        InvalidRequestError: the model gives no dense vectors.
    """
    if settings.model.task == "score":
        return outputs_of(settings, config, family)[0]
    dense = config.output("dense")
    if dense is None or (settings.pooling.outputs or ["dense"]) != ["dense"]:
        has = ", ".join(each.name for each in config.outputs)
        raise InvalidRequestError(
            f"this engine makes dense vectors alone; the model gives {has}: the torch engine "
            "serves it",
            param="engine",
        )
    return replace(dense, select=_modes(settings.pooling, dense.select, family))


def _modes(
    options: PoolingOptions, said: tuple[str, ...] | None, family: PoolingFamily | None
) -> tuple[str, ...]:
    if options.pooling != "auto":
        return (options.pooling,)
    if said is not None:
        return said
    if family is None:
        raise InvalidRequestError(
            "the model does not say how its states are pooled: say it with --pooling",
            param="pooling",
        )
    mode = "lasttoken" if family.causal else "mean"
    _logger.warning("the model does not say how its states are pooled; taking %r (--pooling)", mode)
    return (mode,)


def card_of(
    settings: EngineSettings, config: EmbeddingConfig, model: Any, outputs: Sequence[OutputPlan]
) -> EmbeddingCard:
    """Describe the model's vectors or scores for clients.

    Raises:
        InvalidRequestError: dimensions larger than the vectors.
    """
    if settings.model.task == "score":
        return _scoring_card(config, model, outputs[0])
    cards = tuple(_output_card(output, model) for output in outputs)
    size = next((each.size for each in cards if each.name == "dense"), cards[0].size)
    allowed = (
        settings.pooling.matryoshka_dimensions
        or getattr(model, "matryoshka_dimensions", None)
        or ()
    )
    if any(not 0 < each <= size for each in allowed):
        raise InvalidRequestError(
            f"vectors have {size} elements; matryoshka_dimensions are {list(allowed)}"
        )
    return EmbeddingCard(
        size=size,
        normalize=any(each.normalize for each in cards if each.name == "dense"),
        any_dimensions=bool(getattr(model, "is_matryoshka", False)) and not allowed,
        dimensions=tuple(sorted(allowed)),
        prompts=config.prompts,
        default_prompt=config.default_prompt,
        lower_case=config.lower_case,
        outputs=cards,
    )


def _output_card(output: OutputPlan, model: Any) -> OutputCard:
    if output.source == "classes":
        size = int(model.num_labels)
    elif output.name == "sparse":
        size = int(model.vocab_size)
    else:
        modes = len(output.select or ()) if output.keep == "one" else 1
        hidden = int(model.hidden_size) * modes
        size = output.head[-1].out_features if output.head else hidden
    return OutputCard(
        name=output.name,
        size=size,
        normalize=output.finish == "normalize",
        first=int(output.keep == "each" and output.select == ("rest",)),
        mean=output.mean,
        of_ids=output.keep == "ids",
        labels=_labels(model) if output.source == "classes" else (),
        pooling=(output.select or ()) if output.keep in ("one", "vocabulary") else (),
        linear=output.keep == "one"
        and output.select == ("mean",)
        and all(layer.activation == "identity" for layer in output.head),
    )


def _labels(config: Any) -> tuple[str, ...]:
    """Return the names of a model's classes; empty where its files name none, or not all."""
    names = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    numbers = range(int(config.num_labels))
    return tuple(names[index] for index in numbers) if {*numbers} <= {*names} else ()


def _scoring_card(config: EmbeddingConfig, model: Any, output: OutputPlan) -> EmbeddingCard:
    """Describe a scoring model: its labels, and the activation after its logits."""
    size = 1 if output.words else int(model.num_labels)
    templated = output.select == ("lasttoken",)
    prompt = config.prompts.get(config.default_prompt or "")
    return EmbeddingCard(
        size=size,
        normalize=False,
        activation=_activation(model, size, config.activation),
        labels=() if output.words else _labels(model),
        templated=templated,
        instruction=prompt or None if templated else None,
    )


_BY_PROBLEM = {"regression": "identity", "multi_label_classification": "sigmoid"}


def _activation(config: Any, labels: int, saved: str | None) -> str:
    """Choose the activation after the logits, as vLLM's `get_act_fn` does.

    By the torch class that is `saved` beside the model, else the kind of problem, else the one of
    its configuration that sentence-transformers' `CrossEncoder` reads, else probabilities.

    Raises:
        InvalidRequestError: the model names an unsupported one.
    """
    probabilities = "sigmoid" if labels == 1 else "softmax"
    problem = None if saved else getattr(config, "problem_type", None)
    named = (
        saved
        or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
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


def identity(config: EmbeddingConfig, outputs: Sequence[OutputPlan], *, unit: bool = False) -> str:
    """Return 32 hex digits that identify everything that determines a vector.

    `unit` if the engine normalises vectors whatever the model says.
    """
    hasher = blake3(weights_id(config.directory).encode())
    for output in outputs:
        if output.name in ("dense", "labels"):
            hasher.update(",".join(output.select or ()).encode())
            hasher.update("".join(f" {id_}" for id_ in output.words).encode())
        elif output.head or output.source != "states":
            hasher.update(f"\n{output.name} {output.select} {output.finish}".encode())
        for layer in output.head:
            own = _layer_id(layer.path, config.directory)
            hasher.update(f"{own} {layer.activation}".encode())
    for name, role in config.roles.items():
        if role.static is not None:
            hasher.update(f"\n{name} ".encode() + static_weights(role.static).tobytes())
    if unit:
        hasher.update(b"unit")
    return hasher.digest(16).hex()


def _layer_id(path: Path, model: Path) -> str:
    if path == model:
        return ""  # among the model's own weights
    if path.is_dir() and find_weights(path) is not None:
        return weights_id(path)
    hasher = blake3()
    for file in pickled_files(path):
        hasher.update(file.read_bytes())
    return hasher.digest(16).hex()
