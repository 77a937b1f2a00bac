"""Early checks of settings, without torch and without the weights.

They take milliseconds and run before a model is loaded.
"""

import ctypes
import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.engine.model_files import generation_config
from inlay.engine.sections import DeviceOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.speculation import speculative_config
from inlay.engine.task import task_of
from inlay.engine.torch.weights.families import context_length, family_of
from inlay.engine.torch.weights.media_families import ImageFamily
from inlay.engine.torch.weights.quantised.scheme import scheme_of
from inlay.tensors.checkpoint import config_of

_logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")


def check_settings(settings: EngineSettings, directory: Path | None) -> None:
    """Refuse settings that the torch engine would refuse later.

    Args:
        settings: settings of the engine.
        directory: directory of the model, None if it is not on this machine yet.

    Raises:
        InvalidRequestError: a device this machine does not have, or an unsupported model, dtype,
            quantisation or context length.
    """
    # Another interpreter may have another torch.
    lacks = cuda_lack() if settings.library.engine_python is None else None
    if settings.model.device == "cuda" and lacks is not None:
        raise InvalidRequestError(
            f"--device cuda: {lacks}; allowed here: auto, cpu", param="device"
        )
    on_cpu = settings.model.device == "cpu" or lacks is not None
    if on_cpu and settings.cache.gpu_memory_utilization is not None:
        _logger.warning(
            "--gpu-memory-utilization has no effect: it is a share of a GPU's memory, and the "
            "model runs on a CPU; --kv-cache-memory-bytes says how large the KV cache is"
        )
    if directory is None:
        return
    generation_config(settings.model, directory)
    config = config_of(directory)
    scheme_of(config)
    if on_cpu:
        dtype_name(settings.model.dtype, config, on_cpu=True)
    task = task_of(directory)[0] if settings.model.task == "auto" else settings.model.task
    check_ranks(settings, config, task)
    # What a configuration with a tower leaves out of its `text_config` is known when it loads.
    if task != "generate":
        return
    family = family_of(config)
    check_recurrent(settings.devices, family)
    if family.language is None:
        context_length(settings.batch.max_model_len, config)


def check_recurrent(options: DeviceOptions, family: ImageFamily) -> None:
    """Refuse what a model with recurrent layers does not do.

    Raises:
        InvalidRequestError: a setting that it cannot be used with, and why.
    """
    if not family.recurrent:
        return
    refused = {
        "tensor_parallel_size": (
            options.tensor_parallel_size > 1,
            "such layers are not divided over ranks",
        ),
    }
    for name, (asked, reason) in refused.items():
        if asked:
            raise InvalidRequestError(
                f"--{name.replace('_', '-')}: {family.model_type} has recurrent layers; {reason}",
                param=name,
            )


def check_ranks(settings: EngineSettings, config: Mapping[str, Any], task: str) -> None:
    """Refuse what a model that is divided over ranks does not do.

    Raises:
        InvalidRequestError: a setting that does not go together with `tensor_parallel_size`, or
            heads that the ranks do not divide.
    """
    size = settings.devices.tensor_parallel_size
    if size == 1:
        return
    speculation = speculative_config(settings)
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads") or 1
    shared = text.get("num_key_value_heads") or heads
    reasons = {
        f"it cannot be used with --{name.replace('_', '-')}": settings.value(name)
        for name in ("enable_lora", "enable_sleep_mode")
    } | {
        "keys and values of other workers, host memory or disk belong to whole models (see "
        "--enable-kv-fetch, --kv-offloading-size, --kv-offloading-dir and --role)": (
            settings.moves_kv
        ),
        f"the task {task} runs in one process": task != "generate",
        "a head that guesses tokens (--speculative-config) is not divided": (
            speculation is not None and speculation.reads_states
        ),
        f"{size} ranks do not divide {heads} query heads and {shared} key and value heads": (
            heads % size or shared % size
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise InvalidRequestError(
                f"--tensor-parallel-size {size}: {reason}", param="tensor_parallel_size"
            )


def dtype_name(name: str, config: Mapping[str, Any], *, on_cpu: bool) -> str:
    """Return the dtype for a setting and a checkpoint, by torch's name.

    Raises:
        InvalidRequestError: the dtype is not supported there.
    """
    named = config if "dtype" in config or "torch_dtype" in config else config.get("text_config")
    stored = str((named or {}).get("dtype") or (named or {}).get("torch_dtype") or "float32")
    chosen = stored if name == "auto" else name
    if chosen not in _DTYPES:
        raise InvalidRequestError(f"the checkpoint is {stored}; allowed: {', '.join(_DTYPES)}")
    if chosen == "float16" and on_cpu:
        if name != "auto":
            raise InvalidRequestError(
                "float16 does not run on a CPU; allowed there: float32, bfloat16"
            )
        # What float16 has beyond bfloat16 is less than quantisation has taken away.
        return "bfloat16" if scheme_of(config) else "float32"
    return chosen


def cuda_lack() -> str | None:
    """Return the reason why this environment's torch cannot use a GPU here.

    None if it seems to work, or if torch is not installed.
    """
    spec = find_spec("torch")
    places = None if spec is None else spec.submodule_search_locations
    if not places:
        return None
    try:
        built = (Path(places[0]) / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    if re.search(r"^hip\b.*= '", built, re.MULTILINE):
        return None
    if re.search(r"^cuda\b.*= None", built, re.MULTILINE):
        return "this torch is built for CPUs alone"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver"
    status: int = driver.cuInit(0)
    return None if status == 0 else f"the NVIDIA driver finds no GPU (cuInit: {status})"
