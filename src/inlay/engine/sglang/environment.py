"""Environment variables of SGLang's processes. No SGLang: they must stand before it is imported."""

from collections.abc import Mapping

from inlay.engine.settings import EngineSettings
from inlay.engine.sglang.rooms import address_of

HOST = "SGLANG_HOST_IP"
"""Variable of the IP address that SGLang's processes of a role listen on for one another."""


def environment(
    settings: EngineSettings, inherited: Mapping[str, str], host: str
) -> dict[str, str]:
    """Environment variables for an engine's process, beside those it inherits.

    What a user has set stays.

    `host` is where other workers reach this machine.

    Logprobs are the model's own, before temperature and penalties, as vLLM's and OpenAI's are.
    """
    chosen = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    if settings.model.device == "cpu":
        chosen["SGLANG_USE_CPU_ENGINE"] = "1"
    if settings.kv.role != "both":
        chosen[HOST] = address_of(host)
    if settings.devices.num_threads is not None:
        chosen["OMP_NUM_THREADS"] = str(settings.devices.num_threads)
    return {name: value for name, value in chosen.items() if name not in inherited}
