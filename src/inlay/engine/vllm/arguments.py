"""From inlay's settings, and the words after `--`, to vLLM's own engine arguments."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from inlay.base.errors import InvalidRequestError
from inlay.engine.model_files import dtype_name
from inlay.engine.ranks import has_experts
from inlay.engine.sections import MediaOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.connectors import gives_tickets, transfer_config
from inlay.engine.vllm.images import processor_settings, takes_images

_SAME = (
    "revision",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "max_logprobs",
    "kv_events_config",
    "speculative_config",
    "tensor_parallel_size",
)
"""Settings that both have by the same name; vLLM's own default holds for those not given."""

_SWITCHES = ("enable_prefix_caching", "enforce_eager", "async_scheduling", "enable_sleep_mode")

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those vLLM makes room for."""

_LINEAR = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "dense",
    "q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj", "gate_proj",
    "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "gate", "experts",
)  # fmt: skip
"""Names of the projections that adapters change: all but the embedding table and the head."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise InvalidRequestError(f"vLLM's arguments: {message}")


def engine_args(settings: EngineSettings, directory: Path) -> Any:
    """VLLM's `AsyncEngineArgs`.

    Raises:
        InvalidRequestError: vLLM does not know a word, or it contradicts a setting.
    """
    runs_on = str(current_platform.device_type)
    if settings.model.device not in ("auto", runs_on):
        raise InvalidRequestError(
            f"--device {settings.model.device}: this vLLM is built for {runs_on}, and finds its "
            "devices itself",
            param="device",
        )
    if settings.compute.batch_invariant and runs_on != "cuda":
        raise InvalidRequestError(
            f"--batch-invariant: vLLM has products and attention for it on CUDA alone, and this "
            f"one is built for {runs_on}; the torch engine has it on CPUs",
            param="batch_invariant",
        )
    own = list(_with_inlay_names(settings, directory))
    given = settings.library.engine_arguments
    flags = {_flag(word.partition("=")[0][2:]) for word in given if word.startswith("--")}
    for name in _named_twice(own, flags):
        raise InvalidRequestError(
            f"{name} is given to inlay and, after --, to vLLM; give it to one of them"
        )
    parser = AsyncEngineArgs.add_cli_args(_Parser(prog="vllm", add_help=False, exit_on_error=False))
    # Clients' requests have one priority unless the frontend lets them choose; batches come after
    # them, for places of the step and for blocks.
    parser.set_defaults(scheduling_policy="priority", dtype=dtype_name(settings.model, directory))
    try:
        parsed = parser.parse_args([*own, *given])
        args = AsyncEngineArgs.from_cli_args(parsed)
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"vLLM's arguments: {error}") from error
    if str(args.model) != str(directory):
        raise InvalidRequestError("the model is named before --, not to vLLM")
    images = takes_images(directory)
    rows = images or args.enable_prompt_embeds
    if images:
        _take_images(args, settings.media)
    if args.enable_lora and rows and args.lora_target_modules is None:
        # An adapted embedding table and rows do not go together in vLLM; without it they do.
        args.lora_target_modules = list(_LINEAR)
    if settings.devices.data_parallel_size > 1 and has_experts(directory):
        # Ranks of dense models know nothing of one another.
        args.data_parallel_size, args.data_parallel_rank = (
            settings.devices.data_parallel_size,
            settings.devices.data_parallel_rank or 0,
        )
    if gives_tickets(transfer_config(settings)) and args.disable_hybrid_kv_cache_manager is None:
        # One list of blocks a prompt: a ticket names no more.
        args.disable_hybrid_kv_cache_manager = True
    args.enable_log_requests = False
    args.disable_log_stats = True
    args.worker_extension_cls = "inlay.engine.vllm.extension.WorkerExtension"
    return args


def _take_images(args: Any, options: MediaOptions) -> None:
    """Set vLLM's own arguments for media; other kinds than images take no memory."""
    # Rows are items beside images, for which vLLM needs no flag.
    args.enable_prompt_embeds = False
    args.enable_mm_embeds = options.enable_mm_embeds
    args.limit_mm_per_prompt = {
        "video": 0,
        "audio": 0,
        **args.limit_mm_per_prompt,
        **options.max_media_items,
    }


def _with_inlay_names(settings: EngineSettings, directory: Path) -> Iterator[str]:
    yield from ("--model", str(directory))
    said = settings.given()
    for name in _SAME:
        if (value := said.get(name)) is not None:
            yield from (_flag(name), str(value))
    for name in _SWITCHES:
        if (value := said.get(name)) is not None:
            yield _flag(name if value else f"no_{name}")
    if settings.adapters.enable_lora:
        rank = next(rank for rank in _RANKS if rank >= settings.adapters.max_lora_rank)
        # One more than are served, so that one can take another's place. On a CPU one more still:
        # see `Adapters.room`.
        slots = settings.cpu_loras + 1
        in_batch = slots + 1 if current_platform.is_cpu() else settings.step_loras
        yield from ("--enable-lora", "--max-loras", str(in_batch), "--max-lora-rank", str(rank))
        yield from ("--max-cpu-loras", str(max(slots, in_batch)))
    if settings.model.generation_config != "auto":
        # Its end tokens; sampling defaults are resolved in front of it.
        none = settings.model.generation_config == "none"
        yield from ("--generation-config", "vllm" if none else settings.model.generation_config)
    if "served_model_name" in said:
        yield from ("--served-model-name", *settings.model.served_model_name)
    if "dtype" in said:
        yield from ("--dtype", dtype_name(settings.model, directory))
    processor = processor_settings(settings.media, directory)
    if processor is not None:
        # vLLM makes room for the largest image by them, and gives them to the processor.
        yield from ("--mm-processor-kwargs", json.dumps(processor))
    transfer = transfer_config(settings)
    if transfer is not None:
        yield from ("--kv-transfer-config", json.dumps(transfer))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _named_twice(own: list[str], flags: set[str]) -> list[str]:
    bare = {flag.replace("--no-", "--") for flag in flags}
    return [word for word in own if word.startswith("--") and word.replace("--no-", "--") in bare]
