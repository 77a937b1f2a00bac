"""From inlay's settings, and the words after `--`, to SGLang's own server arguments."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from sglang.srt.server_args import ServerArgs

from inlay.base.errors import InvalidRequestError
from inlay.engine.model_files import dtype_name
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang import rooms
from inlay.engine.sglang.environment import HOST
from inlay.engine.slots import PROBES

_NAMES = {
    "revision": "--revision",
    "max_model_len": "--context-length",
    "max_num_seqs": "--max-running-requests",
    "max_num_batched_tokens": "--chunked-prefill-size",
    "tensor_parallel_size": "--tensor-parallel-size",
}
"""SGLang's names of settings; its own default holds for those that are not given."""

_ON_A_CPU = {
    "--attention-backend": "torch_native",
    "--disable-cuda-graph": None,
    "--sleep-on-idle": None,
}
"""Without a GPU: its package has no kernels for a CPU, and an idle engine would take a core."""

_BY_PRIORITY = {
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "disable_priority_preemption": True,
    "retraction_policy": "priority",
}
"""Batches come after clients' requests, for the next prompt and for what is retracted. A place is
taken back by inlay itself."""

_POLICIES = ("fcfs", "lof")
"""Those of SGLang that know priorities."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidRequestError(f"SGLang's arguments: {message}")


def server_args(settings: EngineSettings, directory: Path, *words: str) -> Any:
    """SGLang's `ServerArgs`.

    Raises:
        InvalidRequestError: SGLang does not know a word, or it is given twice.
    """
    given = settings.library.engine_arguments
    flags = {word.partition("=")[0] for word in given}
    own = [*_with_inlay_names(settings, directory), *words]
    own += rooms.words(settings, os.environ.get(HOST, "127.0.0.1"))
    for name in flags.intersection(own):
        raise InvalidRequestError(
            f"{name} is given to inlay and, after --, to SGLang; give it to one of them"
        )
    if settings.model.device == "cpu":
        for flag, value in _ON_A_CPU.items():
            own += [] if flag in flags else [flag, *filter(None, [value])]
    parser = _Parser(prog="sglang", add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        parsed = parser.parse_args([*own, *given])
        chosen = any("--" + name.replace("_", "-") in flags for name in _BY_PRIORITY)
        if parsed.schedule_policy in _POLICIES and not chosen:
            vars(parsed).update(_BY_PRIORITY)
        return ServerArgs.from_cli_args(parsed)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"SGLang's arguments: {error}") from error


def _with_inlay_names(settings: EngineSettings, directory: Path) -> Iterator[str]:
    yield from ("--model-path", str(directory), "--skip-tokenizer-init", "--log-level", "warning")
    yield from ("--dtype", dtype_name(settings.model, directory))
    if settings.model.device != "auto":
        yield from ("--device", settings.model.device)
    said = settings.given()
    for name, flag in _NAMES.items():
        if (value := said.get(name)) is not None:
            yield from (flag, str(value + PROBES if name == "max_num_seqs" else value))
    if not settings.cache.enable_prefix_caching:
        yield "--disable-radix-cache"
    if settings.compute.enforce_eager and settings.model.device != "cpu":
        yield "--disable-cuda-graph"
