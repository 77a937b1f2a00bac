"""Environment variables of vLLM's processes. No vLLM: they must stand before it is imported."""

from collections.abc import Mapping

from inlay.base.errors import InvalidRequestError
from inlay.engine.ports import free_port
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.connectors import gives_tickets, transfer_config

_NANS = "VLLM_COMPUTE_NANS_IN_LOGITS"
_INVARIANT = "VLLM_BATCH_INVARIANT"


def environment(
    settings: EngineSettings, inherited: Mapping[str, str], host: str
) -> dict[str, str]:
    """Environment variables for an engine's process, beside those it inherits.

    What a user has set stays.

    vLLM reports its use to its makers unless told not to; inlay asks nobody's server for anything.
    Non-finite logits are counted, which costs one pass over them: they end the request they belong
    to. `host` is where other workers reach this machine; two of one machine need ports of their
    own.
    """
    chosen = {"VLLM_NO_USAGE_STATS": "1", _NANS: "1"}
    if settings.compute.batch_invariant:
        chosen[_INVARIANT] = "1"
    if settings.devices.num_threads is not None:
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        chosen["OMP_NUM_THREADS"] = str(settings.devices.num_threads)
    if gives_tickets(transfer_config(settings)):
        chosen["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        chosen["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(host))
    return {name: value for name, value in chosen.items() if name not in inherited}


def check(inherited: Mapping[str, str]) -> None:
    """Raise `InvalidRequestError` where a user has turned the guard against NaN off."""
    if inherited.get(_NANS, "1").strip() == "0":
        raise InvalidRequestError(
            f"{_NANS}=0 is set: NaN from one prompt could reach the answers of others; unset it, "
            "or set it to 1"
        )
