"""Vector configuration of a model directory: pooling, Dense layers, normalisation, prompts.

Read from sentence-transformers' files, as other embedding servers do.

`modules.json` lists the modules in order: a Transformer, a Pooling, any number of Dense layers, and
Normalize. Other modules are refused, as ignoring them would change the vectors.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from inlay.base.errors import InvalidRequestError

PoolingMode: TypeAlias = Literal[
    "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
]
"""Names and order of sentence-transformers."""

POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)

_ENDLESS = 1 << 31

_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Field names before sentence-transformers 5.2."""

ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
"""Supported activations of a Dense layer or a pair's score, by torch class name."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One Dense layer.

    Attributes:
        directory: directory of its weights.
        in_features: input size.
        out_features: output size.
        bias: True if the layer has one.
        activation: one of the values of `ACTIVATIONS`.
    """

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Steps from hidden states to vectors.

    Attributes:
        directory: directory of transformer and tokenizer.
        pooling: modes whose results are concatenated; None if the model does not say.
        dense: Dense layers after pooling.
        normalize: True if vectors have length 1.
        max_length: maximum number of positions of a text, special tokens included; None if only the
            transformer limits it.
        lower_case: lower-case texts before tokenizing.
        prompts: prefixes of texts, by name; an empty one is a prompt too.
        default_prompt: name of the prefix for requests that name none.
    """

    directory: Path
    pooling: tuple[PoolingMode, ...] | None
    dense: tuple[DenseConfig, ...]
    normalize: bool
    max_length: int | None
    lower_case: bool
    prompts: dict[str, str]
    default_prompt: str | None

    @classmethod
    def read(cls, directory: Path) -> "EmbeddingConfig":
        """Read the files of `directory`.

        Without `modules.json` the model is a bare transformer, whose vectors are normalised.

        Raises:
            InvalidRequestError: an unsupported module or setting, or a damaged file.
        """
        modules = _json(directory / "modules.json", [])
        if not isinstance(modules, list):
            raise InvalidRequestError(f"{directory / 'modules.json'} must hold a list")
        named = [
            (str(module["type"]).rpartition(".")[2], directory / str(module.get("path", "")))
            for module in modules
        ]
        kinds = [kind for kind, _ in named]
        transformer = named[0][1] if named else directory
        if named:
            _check_order(kinds, directory)
        settings = _object(transformer / "sentence_bert_config.json")
        prompts = _object(directory / "config_sentence_transformers.json")
        return cls(
            directory=transformer,
            pooling=_pooling(_object(named[1][1] / "config.json"), directory) if named else None,
            dense=tuple(_dense(path) for kind, path in named if kind == "Dense"),
            normalize="Normalize" in kinds or not named,
            max_length=_max_length(settings, _object(transformer / "tokenizer_config.json")),
            lower_case=bool(settings.get("do_lower_case", False)),
            prompts={
                str(name): str(text or "") for name, text in (prompts.get("prompts") or {}).items()
            },
            default_prompt=prompts.get("default_prompt_name"),
        )


def _max_length(settings: dict[str, Any], tokenizer: dict[str, Any]) -> int | None:
    """Return the model's limit, else its tokenizer's (1e30 there means none)."""
    length = settings.get("max_seq_length") or tokenizer.get("model_max_length")
    return int(length) if length is not None and length < _ENDLESS else None


def _json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot read {path}: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    found = _json(path, {})
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{path} must hold an object")
    return found


def _check_order(kinds: list[str], directory: Path) -> None:
    middle = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in middle):
        raise InvalidRequestError(
            f"{directory} is made of {', '.join(kinds)}; served are Transformer, Pooling, any "
            "number of Dense, and Normalize, in this order"
        )


def _pooling(config: dict[str, Any], directory: Path) -> tuple[PoolingMode, ...]:
    if config.get("include_prompt") is False:
        raise InvalidRequestError(
            f"{directory} leaves prompts out of its pooling, which is not served"
        )
    named = config.get("pooling_mode")
    if named is None:
        modes: list[Any] = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown:
        raise InvalidRequestError(
            f"pooling {unknown[0]!r} is not served; served: {', '.join(POOLING_MODES)}"
        )
    return tuple(cast("list[PoolingMode]", modes))


def _dense(directory: Path) -> DenseConfig:
    config = _object(directory / "config.json")
    if config.get("use_residual"):
        raise InvalidRequestError(
            f"{directory} is a Dense layer with a residual, which is not served"
        )
    return DenseConfig(
        directory,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        activation_of(
            config.get("activation_function", "torch.nn.modules.activation.Tanh"), directory
        ),
    )


def activation_of(name: object, directory: Path) -> str:
    """Look up an activation by its torch class name in a file of `directory`.

    Raises `InvalidRequestError` if it is not supported.
    """
    found = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidRequestError(
            f"{directory} ends with {name}, which is not served; served: {', '.join(ACTIVATIONS)}"
        )
    return found
