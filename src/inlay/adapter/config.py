"""Parsing of `adapter_config.json`: the supported part of PEFT's configuration.

Settings that would change the result and are not supported are refused.

The fields are those of PEFT 0.21 (`LoraConfig`, `PromptTuningConfig`).
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.adapter.patterns import Patterns, PatternWork
from inlay.base.errors import InvalidRequestError

MAX_CONFIG_BYTES = 1024 * 1024

_HARMLESS = frozenset(
    {
        "arrow_config", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
        "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
        "kasa_config", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
        "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type",
        "peft_version", "qalora_group_size", "r", "rank_pattern", "alpha_pattern", "revision",
        "runtime_config", "target_modules", "task_type", "use_rslora", "velora_config",
        "monteclora_config", "ensure_weight_tying",
    }
)  # fmt: skip
"""Fields of a LoRA config that are read, or that matter only during training."""

_REFUSED = {
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layers that are replicated",
    "lora_bias": "biases",
    "modules_to_save": "modules that are saved whole",
    "target_parameters": "parameters instead of modules, as those of experts",
    "trainable_token_indices": "rows of the embedding table",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
}
"""Fields of a LoRA config that change its result in unsupported ways."""

_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga", "true", "false"})
"""Named initialisations that leave the base model's weights unchanged."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Ranks and scales of a LoRA's matrices.

    Attributes:
        rank: rank of modules that match none of `ranks`.
        alpha: alpha of modules that match none of `alphas`.
        rank_stabilised: the scale is alpha / sqrt(rank) instead of alpha / rank.
        ranks: by pattern of modules' names.
        alphas: the same.
    """

    rank: int
    alpha: float
    rank_stabilised: bool = False
    ranks: Patterns = field(default_factory=Patterns)
    alphas: Patterns = field(default_factory=Patterns)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices. Raises as `Patterns.first`."""
        return int(self.ranks.first(module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of the product of a module's matrices. Raises as `Patterns.first`."""
        alpha = self.alphas.first(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Shape of a prompt-tuning adapter: embedding vectors put before every prompt."""

    num_positions: int
    hidden_size: int


def parse_config(raw: bytes | bytearray) -> LoraConfig | PromptConfig:
    """Parse the text of an `adapter_config.json`.

    Raises:
        InvalidRequestError: not such a file, or it needs an unsupported feature.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("adapter_config.json is not JSON") from error
    if not isinstance(config, dict):
        raise InvalidRequestError("adapter_config.json is not an object in JSON")
    kind = config.get("peft_type")
    if kind == "LORA":
        return lora_config(config, PatternWork())
    if kind == "PROMPT_TUNING":
        return _prompt(config)
    raise InvalidRequestError(
        f"adapters of peft_type {_shown(kind)} are not supported; supported: LORA, PROMPT_TUNING"
    )


def lora_config(config: Mapping[str, Any], work: PatternWork) -> LoraConfig:
    """Return the supported part of a LoRA's configuration.

    Raises `InvalidRequestError` as `parse_config`; `work` is of the adapter.
    """
    for name, what in _REFUSED.items():
        if config.get(name):
            raise InvalidRequestError(
                f"the adapter sets {name}: {what} are not supported in a LoRA"
            )
    bias = config.get("bias", "none")
    if bias != "none":
        raise InvalidRequestError(
            f"the adapter has bias {_shown(bias)}; a LoRA must have none: biases are not supported"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise InvalidRequestError(
            f"the adapter was begun with init_lora_weights {_shown(init)}, which changes the base "
            "model's weights; convert it to a plain LoRA "
            "(path_initial_model_for_weight_conversion in PEFT)"
        )
    unknown = sorted(
        name for name in config if name not in _HARMLESS and name not in _REFUSED and config[name]
    )
    if unknown:
        raise InvalidRequestError(
            f"the adapter sets {_shown(unknown[0])}, of which is not known what it changes; remove "
            "it from adapter_config.json if it changes nothing"
        )
    return LoraConfig(
        rank=_whole(config.get("r"), "r"),
        alpha=_number(config.get("lora_alpha"), "lora_alpha"),
        rank_stabilised=bool(config.get("use_rslora")),
        ranks=_by_pattern(config, "rank_pattern", _whole, work),
        alphas=_by_pattern(config, "alpha_pattern", _number, work),
    )


def _prompt(config: Mapping[str, Any]) -> PromptConfig:
    submodules = config.get("num_transformer_submodules", 1)
    if submodules not in (1, None):
        raise InvalidRequestError(
            f"the adapter has rows for {_shown(submodules)} transformers; a decoder is one"
        )
    return PromptConfig(
        _whole(config.get("num_virtual_tokens"), "num_virtual_tokens"),
        _whole(config.get("token_dim"), "token_dim"),
    )


def _by_pattern(
    config: Mapping[str, Any], name: str, number: Callable[[Any, str], float], work: PatternWork
) -> Patterns:
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{name} must be an object, got {_shown(given)}")
    found = Patterns(work)
    for key, value in given.items():
        found.add(name, key, number(value, name))
    return found


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise InvalidRequestError(f"{name} must be a whole number above 0, got {_shown(value)}")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise InvalidRequestError(f"{name} must be a number, got {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    return repr(value)[:80]
