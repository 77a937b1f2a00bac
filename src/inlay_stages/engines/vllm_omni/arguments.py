"""From inlay's settings, and the words after `--`, to arguments of `AsyncOmni`."""

import argparse
from dataclasses import fields
from typing import Any, NoReturn

from vllm_omni.platforms import current_omni_platform
from vllm_omni.utils.tracking_parser import TrackingArgumentParser

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings

_SAME = ("max_num_seqs", "enforce_eager", "enable_sleep_mode")
"""Settings that both have by the same name; vLLM-Omni's own default holds for those not given."""

_ELSEWHERE = {
    "api_server_count",
    "grpc",
    "headless",
    "omni_master_address",
    "omni_master_port",
    "omni_replica_address",
    "replica_id",
    "stage_id",
}
"""Flags of processes and stages on other machines, which inlay has in its place."""


class _Parser(TrackingArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise InvalidRequestError(f"vLLM-Omni's arguments: {message}")


def omni_arguments(settings: EngineSettings, dtype: str) -> dict[str, Any]:
    """Return the arguments of `AsyncOmni` beside its model.

    Args:
        settings: inlay's own, and the words for vLLM-Omni.
        dtype: of the models, for all stages.

    Raises:
        InvalidRequestError: vLLM-Omni does not know a word, or it contradicts a setting.
    """
    runs_on = str(current_omni_platform.device_type)
    if settings.model.device not in ("auto", runs_on):
        raise InvalidRequestError(
            f"--device {settings.model.device}: this vLLM-Omni runs on "
            f"{runs_on or 'no device here'}, and finds its devices itself",
            param="device",
        )
    given = _parsed(settings.library.engine_arguments)
    said = settings.given()
    own = {name: said[name] for name in _SAME if name in said}
    if "dtype" in said or "dtype" not in given:
        own["dtype"] = dtype
    for name in sorted(own.keys() & given.keys()):
        flag = f"--{name.replace('_', '-')}"
        raise InvalidRequestError(
            f"{flag} is given to inlay and, after --, to vLLM-Omni; give it to one of them"
        )
    return given | own


def _parsed(words: list[str]) -> dict[str, Any]:
    if not words:
        return {}
    # Late: its commands import their benchmarks, with libraries that nothing else takes.
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    # Subcommands' parsers are of the class of the one above.
    commands = _Parser(prog="vllm", add_help=False).add_subparsers()
    parser = OmniServeCommand().subparser_init(commands)
    try:
        found = parser.parse_args(words).get_explicit_kwargs_dict()
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"vLLM-Omni's arguments: {error}") from error
    found.pop("omni", None)
    if found.keys() & {"model", "model_tag"}:
        raise InvalidRequestError("the model is named before --, not to vLLM-Omni")
    servers = {field.name for field in fields(FrontendArgs)} | _ELSEWHERE
    for name in sorted(found.keys() & servers):
        raise InvalidRequestError(
            f"--{name.replace('_', '-')} is of vLLM-Omni's own server, which inlay is in place of"
        )
    return dict(found)
