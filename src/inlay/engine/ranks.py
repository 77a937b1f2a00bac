"""Data-parallel ranks: one engine in one process each. No torch.

To routers each rank is a target of its own, with its own events and metrics. vLLM also runs the
ranks of dense models independently; those of a mixture of experts step together, and find each
other as vLLM's ranks behind an external load balancer do.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from inlay.base.errors import InvalidRequestError
from inlay.engine.sections import DeviceOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in model configurations, as in vLLM."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"

SHORT: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-O": "--optimization-level",
}
"""vLLM's short flags, by the long ones."""

_FIELDS = {
    "--data-parallel-size": "data_parallel_size",
    "--data-parallel-rank": "data_parallel_rank",
}
_DEVICES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--prefill-context-parallel-size")
"""vLLM flags whose product is the number of processes, one device each, of one rank."""

_OTHERWISE = (
    *("--data-parallel-size-local", "--data-parallel-start-rank", "--data-parallel-hybrid-lb"),
    *("--data-parallel-external-lb", "--data-parallel-multi-port-external-lb"),
)
"""Other vLLM flags that distribute ranks over processes."""

_ATTACHED = re.compile(r"(-[a-z]+|-O)([0-9]+)", re.ASCII)
"""A short flag with its number attached, which vLLM's parser accepts."""


@dataclass(frozen=True)
class Rank:
    """One data-parallel rank."""

    settings: EngineSettings
    environment: Mapping[str, str] = field(default_factory=dict)


def with_ranks(engine: EngineSettings) -> EngineSettings:
    """Move vLLM's own rank flags into the settings: inlay starts the ranks, not vLLM.

    Raises:
        InvalidRequestError: a flag without a number, conflicting flags, or another way of
            distributing ranks.
    """
    said: dict[str, int] = {}
    kept: list[str] = []
    words = iter(engine.library.engine_arguments)
    for word in words:
        flag, shown, value = split_flag(word)
        if flag in _OTHERWISE:
            raise InvalidRequestError(
                f"{shown}: each data-parallel rank runs as an engine of its own here; "
                "--data-parallel-size says how many there are, --data-parallel-rank which of them "
                "alone to run"
            )
        if flag in _FIELDS:
            said[_FIELDS[flag]] = _number(shown, next(words, "") if value is None else value)
        else:
            kept.append(word)
    for name in said:
        if name in engine.given():
            shown = "--" + name.replace("_", "-")
            raise InvalidRequestError(
                f"{shown} is given to inlay and, after --, to vLLM; give it to one of them"
            )
    return engine if not said else engine.replace(**said, engine_arguments=kept)


def split_flag(word: str) -> tuple[str, str, str | None]:
    """Return an argument's flag in long form, as written, and its attached value.

    The value is None if the next argument holds it.
    """
    flag, equals, value = word.partition("=")
    attached = _ATTACHED.fullmatch(word)
    if attached is not None and attached[1] in SHORT:
        return SHORT[attached[1]], attached[1], attached[2]
    long = flag.replace("_", "-") if flag.startswith("--") else SHORT.get(flag, flag)
    return long, flag, value if equals else None


def _number(flag: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise InvalidRequestError(f"{flag} takes a number, got {value!r}")
    return int(value)


def check_ranks(options: DeviceOptions) -> None:
    """Raise `InvalidRequestError` if the rank does not exist."""
    size, rank = options.data_parallel_size, options.data_parallel_rank
    if size < 1:
        raise InvalidRequestError(f"--data-parallel-size must be at least 1, got {size}")
    if rank is not None and rank >= size:
        raise InvalidRequestError(
            f"--data-parallel-rank {rank}: with --data-parallel-size {size} ranks are 0 to "
            f"{size - 1}",
            param="data_parallel_rank",
        )


def ranks_of(engine: EngineSettings, inherited: Mapping[str, str]) -> list[Rank]:
    """Return the ranks to start in this process: all, or the one that is named.

    Several ranks share the machine: each gets a part of the cores, unless a number of threads is
    set, and devices of its own.

    Raises:
        InvalidRequestError: fewer devices than the ranks need.
    """
    size = engine.devices.data_parallel_size
    if size == 1 or engine.devices.data_parallel_rank is not None:
        return [Rank(engine)]
    changes: dict[str, int] = {}
    if engine.model.engine != "vllm" and engine.devices.num_threads is None:
        changes["num_threads"] = threads.count(None, size * engine.devices.tensor_parallel_size)
    found = []
    for rank in range(size):
        settings = engine.replace(**changes, data_parallel_rank=rank)
        found.append(Rank(settings, _devices(engine, rank, inherited)))
    return found


def _devices(engine: EngineSettings, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    if engine.model.device == "cpu" or engine.model.engine == "echo":
        return {}
    ranks = engine.devices.data_parallel_size
    each = engine.devices.tensor_parallel_size * _devices_each(engine.library.engine_arguments)
    given = inherited.get(_VISIBLE)
    if given is None:
        names = [str(number) for number in range(each * ranks)]
    else:
        names = [name for name in given.split(",") if name]
        if names and len(names) < each * ranks:
            raise InvalidRequestError(
                f"{ranks} ranks of {each} need {each * ranks} devices; {_VISIBLE} names "
                f"{len(names)}",
                param="data_parallel_size",
            )
    return {_VISIBLE: ",".join(names[rank * each : (rank + 1) * each])}


def _devices_each(words: Sequence[str]) -> int:
    said: dict[str, int] = {}
    rest = iter(words)
    for word in rest:
        flag, shown, value = split_flag(word)
        if flag in _DEVICES:
            said[flag] = _number(shown, next(rest, "") if value is None else value)
    return prod(said.values())


def has_experts(directory: Path) -> bool:
    """Return True if a model is a mixture of experts.

    Raises `InvalidRequestError` if `directory` holds no model.
    """
    # Imported late: every command imports this module, and the model readers are slow to import.
    from inlay.tensors.checkpoint import config_of

    config = config_of(directory)
    text = config.get("text_config") or config
    return any(text.get(name) for name in _EXPERTS)


def tied(engine: EngineSettings) -> bool:
    """Return True if ranks step together, so that none can run without the others."""
    if engine.model.engine != "vllm" or engine.devices.data_parallel_size == 1:
        return False
    from inlay.tensors.hub import local_directory

    directory = local_directory(engine.model.model)
    return directory is None or has_experts(directory)
