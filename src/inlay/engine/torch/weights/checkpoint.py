"""Load a model directory with transformers: from safetensors only, without code of its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from inlay.engine.torch.checks import dtype_name
from inlay.engine.torch.weights.block_fp8 import block_of, check_has_scales, dequantised
from inlay.engine.torch.weights.families import next_token_layers
from inlay.engine.torch.weights.progress import log_progress
from inlay.errors import InvalidRequestError
from inlay.tensors.table import check_tensors, config_of, stored_tensors

_logger = logging.getLogger(__name__)


def load(
    kind: Any,
    directory: Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str | dict[str, str],
    spared: str = "",
    config: Any = None,
) -> Any:
    """Load a model on the CPU, in evaluation mode and without gradients.

    Args:
        kind: transformers class; no `Auto` class if the weights are fp8.
        directory: directory with configuration and safetensors.
        dtype: dtype of its weights.
        attn_implementation: name of the attention in transformers, or names by sub-configuration.
        spared: prefix of weight names that may be missing; none unless given.
        config: transformers configuration in place of the directory's own, such as one with fewer
            layers, whose weights are not read then.

    Raises:
        InvalidRequestError: it cannot be read, its quantisation is not supported, or weights are
            missing or of another shape; the message names them.
    """
    transformers_logging.disable_progress_bar()
    check_tensors(directory)
    try:
        with _weights(directory, config) as weights, log_progress(directory):
            model, info = kind.from_pretrained(
                **weights,
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidRequestError(f"{directory} cannot be loaded: {error}") from error
    names = map(str, [*info["missing_keys"], *info["mismatched_keys"]])
    lacking = sorted(name for name in names if not (spared and name.startswith(spared)))
    if lacking:
        raise InvalidRequestError(
            f"{directory} lacks weights of the model: {', '.join(lacking[:8])}"
        )
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


@contextmanager
def _weights(directory: Path, parsed: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` for the weights.

    Either the directory, or a state dict that dequantises while it is read. `parsed` is the
    configuration, or None for the directory's.
    """
    config = config_of(directory)
    layers, block = next_token_layers(config), block_of(config)
    if layers and any(tensor.name.startswith(layers) for tensor in stored_tensors(directory)):
        _logger.info(
            "multi-token prediction is not used: %s* of the checkpoint are left out",
            "*, ".join(layers),
        )
    if block is None:
        check_has_scales(directory)
        if parsed is None:
            yield {"pretrained_model_name_or_path": directory}
            return
        # Every weight that is left out would be reported.
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        try:
            yield {"pretrained_model_name_or_path": directory, "config": parsed}
        finally:
            transformers_logging.set_verbosity(verbosity)
        return
    _logger.info(
        "the weights are fp8 in blocks of %d x %d: each is dequantised as it is read", *block
    )
    if parsed is None:
        parsed = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    del parsed.quantization_config
    with dequantised(directory, block, layers) as state_dict:
        yield {"pretrained_model_name_or_path": None, "config": parsed, "state_dict": state_dict}


def device_of(name: str) -> torch.device:
    """Return the device of a setting. Raises `InvalidRequestError` if it is not available."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InvalidRequestError(
            "device cuda was asked for, and this machine or this torch has none; allowed: auto, cpu"
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def dtype_of(name: str, config: dict[str, Any], device: torch.device) -> torch.dtype:
    """Return the dtype of a setting for a checkpoint and a device.

    Raises `InvalidRequestError` if the device does not support it.
    """
    chosen = dtype_name(name, config, on_cpu=device.type == "cpu")
    if (
        name == "auto"
        and chosen == "float32"
        and config.get("dtype", config.get("torch_dtype")) == "float16"
    ):
        _logger.warning(
            "the checkpoint is float16, which a CPU does not compute: running in float32"
        )
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype


__all__ = ["device_of", "dtype_of", "load"]
