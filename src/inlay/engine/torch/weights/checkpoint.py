"""Load a model directory with transformers: from safetensors only, without code of its own."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.logging import set_tqdm_hook

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.checks import dtype_name
from inlay.engine.torch.light_transformers import without_compiler
from inlay.engine.torch.weights.experts import compute_apart
from inlay.engine.torch.weights.families import next_token_layers
from inlay.engine.torch.weights.gguf import BlockProducts, gguf_weights
from inlay.engine.torch.weights.quantised.reading import (
    KeptWeights,
    check_has_scales,
    quantised_weights,
)
from inlay.engine.torch.weights.quantised.rounding import round_linears
from inlay.engine.torch.weights.quantised.scheme import scheme_of
from inlay.tensors.checkpoint import check_tensors, config_of, stored_tensors
from inlay.tensors.gguf import is_gguf
from inlay.tensors.tidy_directory import tidied

_logger = logging.getLogger(__name__)

_NVIDIA = Path("/dev/nvidiactl")
"""Device of the NVIDIA driver."""


def load(
    kind: Any,
    directory: Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str | dict[str, str],
    spared: str | tuple[str, ...] = (),
    config: Any = None,
    keep_quantised: bool = False,
    blocks: BlockProducts | None = None,
    device: torch.device | None = None,
    rename: Callable[[str], str | None] | None = None,
) -> Any:
    """Load a model in evaluation mode and without gradients.

    Args:
        kind: transformers class; no `Auto` class if the weights are quantised.
        directory: directory with configuration and safetensors.
        dtype: dtype of its weights.
        attn_implementation: name of the attention in transformers, or names by sub-configuration.
        spared: prefix, or prefixes, of weight names that may be missing; none unless given.
        config: transformers configuration in place of the directory's own, such as one with fewer
            layers, whose weights are not read then.
        keep_quantised: leave a `KeptWeight` in linear layers whose weights are quantised, for
            `accelerate`; otherwise they are dequantised.
        blocks: products for which weights stay in GGUF's blocks, or are rounded to them, with
            `keep_quantised`; None: weights in blocks are dequantised.
        device: read weights straight to it, so that the model need not fit into host memory; None:
            to the CPU.
        rename: returns the model's name of a tensor in the files, None for one to leave out;
            unless given, the names are the model's, and layers that predict further tokens are
            left out.

    Raises:
        InvalidRequestError: it cannot be read, its quantisation is not supported, or weights are
            missing or of another shape; the message names them.
    """
    transformers_logging.disable_progress_bar()
    check_tensors(directory)
    native = None if blocks is None else blocks.native
    kept = KeptWeights(dtype, native) if keep_quantised else None
    try:
        with (
            tidied(directory) as tidy,
            _weights(
                directory if is_gguf(directory) else tidy, dtype, config, kept, rename
            ) as weights,
            log_progress(directory),
            without_compiler(),
        ):
            model, info = kind.from_pretrained(
                **weights,
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                **({} if device is None else {"device_map": {"": device}}),
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidRequestError(f"{directory} cannot be loaded: {error}") from error
    names = map(str, [*info["missing_keys"], *info["mismatched_keys"]])
    lacking = sorted(name for name in names if not (spared and name.startswith(spared)))
    if lacking:
        raise InvalidRequestError(
            f"{directory} lacks weights of the model: {', '.join(lacking[:8])}"
        )
    if kept is not None:
        kept.settle(model)
        if blocks is not None and blocks.quantization is not None:
            round_linears(model, blocks.quantization, blocks.native, dtype)
    compute_apart(model)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def parsed_config(directory: Path) -> Any:
    """Return transformers' configuration of a model; of Qwen2.5-Omni its thinker's.

    Raises:
        InvalidRequestError: it cannot be read.
    """
    try:
        with tidied(directory) as tidy:
            found = AutoConfig.from_pretrained(tidy, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{directory} cannot be loaded: {error}") from error
    return getattr(found, "thinker_config", found)


@contextmanager
def _weights(
    directory: Path,
    dtype: torch.dtype,
    parsed: Any,
    kept: KeptWeights | None,
    rename: Callable[[str], str | None] | None,
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` for the weights.

    Either the directory, or a state dict of weights that are quantised, in GGUF, or renamed.
    `dtype` is that of weights in GGUF, `parsed` the configuration, or None for the directory's;
    `kept` and `rename` are as for `quantised_weights`.
    """
    if is_gguf(directory):
        config = parsed_config(directory) if parsed is None else parsed
        named = gguf_weights(directory, dtype, rename or str, kept)
        yield {"pretrained_model_name_or_path": None, "config": config, "state_dict": named}
        return
    config = config_of(directory)
    layers, scheme = next_token_layers(config), scheme_of(config)
    if rename is not None:
        layers = ()
    if layers and any(tensor.name.startswith(layers) for tensor in stored_tensors(directory)):
        _logger.info(
            "%s* of the checkpoint, which predict further tokens, are not part of the model: "
            '--speculative-config \'{"method": "mtp"}\' has them guess',
            "*, ".join(layers),
        )
    if scheme is None:
        check_has_scales(directory)
    if scheme is None and rename is None:
        if parsed is None:
            yield {"pretrained_model_name_or_path": directory}
            return
        with _without_report():
            yield {"pretrained_model_name_or_path": directory, "config": parsed}
        return
    if scheme is not None:
        _logger.info(
            "the weights are quantised (%s): %s",
            scheme.method,
            "each is dequantised as it is read"
            if kept is None
            else "those of linear layers stay so",
        )
    if parsed is None:
        parsed = parsed_config(directory)
    if hasattr(parsed, "quantization_config"):
        del parsed.quantization_config
    with quantised_weights(directory, scheme, layers, kept, rename or str) as state_dict:
        arguments = {"config": parsed, "state_dict": state_dict}
        with nullcontext() if rename is None else _without_report():
            yield {"pretrained_model_name_or_path": None, **arguments}


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep transformers from reporting every weight that is left out, within this context."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def device_of(name: str) -> torch.device:
    """Return the device of a setting. Raises `InvalidRequestError` if it is not available."""
    available = torch.cuda.is_available()
    if name == "auto" and not available and _NVIDIA.exists():
        _logger.warning(
            "the model runs on the CPU: this machine has an NVIDIA GPU, and torch %s cannot use it "
            "(built for CUDA %s); install a torch that the driver runs",
            torch.__version__,
            torch.version.cuda or "not at all",
        )
    if name == "cuda" and not available:
        raise InvalidRequestError(
            "device cuda was asked for, but torch sees no CUDA device here; allowed: auto, cpu"
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def dtype_of(name: str, config: dict[str, Any], device: torch.device) -> torch.dtype:
    """Return the dtype of a setting for a checkpoint and a device.

    Raises `InvalidRequestError` if the device does not support it.
    """
    chosen = dtype_name(name, config, on_cpu=device.type == "cpu")
    if (
        name == "auto"
        and chosen != "float16"
        and config.get("dtype", config.get("torch_dtype")) == "float16"
    ):
        _logger.warning(
            "the checkpoint is float16, which a CPU does not compute: running in %s", chosen
        )
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype


SECONDS = 3.0
"""Seconds between two lines about progress."""

_LOADING = "Loading weights"
"""Description of the loop that reads weights in transformers (5.16 to 5.23)."""


class LoadProgress:
    """Counts the bytes of a checkpoint while they are loaded.

    Args:
        sizes: bytes of each tensor, by its name in the checkpoint.
        tell: receives a line, at most every `SECONDS`, and at the end if it was called before.
        clock: returns seconds.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes = sizes
        self._tell = tell
        self._clock = clock

    def over(self, items: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the items of `items`, one for each loaded parameter.

        The time between two items is the loading of the first.
        """
        total = sum(self._sizes.values())
        known = {name: self._sizes[name] for name in items if name in self._sizes}
        # Parameters made of several tensors share the remaining bytes.
        other = (total - sum(known.values())) / max(1, len(items) - len(known))
        begun = last = self._clock()
        done = 0.0
        for name, item in items.items():
            yield name, item
            done += known.get(name, other)
            now = self._clock()
            if now - last >= SECONDS:
                last = now
                self._tell(
                    f"loading weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB, "
                    f"{done / max(1, total):.0%}"
                )
        if last > begun:
            self._tell(
                f"loaded {total / 1e9:.1f} GB of weights in {self._clock() - begun:.0f} s; "
                "preparing them"
            )


@contextmanager
def log_progress(directory: Path) -> Iterator[None]:
    """Log transformers' loading of the weights in `directory` within this context."""
    progress = LoadProgress(
        {tensor.name: tensor.nbytes for tensor in stored_tensors(directory)}, _logger.info
    )

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") != _LOADING or not args:
            return factory(*args, **kwargs)
        return progress.over(dict(args[0]))

    before = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(before)
