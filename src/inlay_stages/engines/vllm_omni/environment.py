"""Environment variables of vLLM-Omni's process. They must stand before it is imported."""

from collections.abc import Mapping

from inlay.engine.settings import EngineSettings


def environment(
    settings: EngineSettings, inherited: Mapping[str, str], host: str
) -> dict[str, str]:
    """Environment variables for an engine's process, beside those it inherits.

    What a user has set stays. vLLM reports its use to its makers unless told not to.
    """
    chosen = {"VLLM_NO_USAGE_STATS": "1"}
    if settings.devices.num_threads is not None:
        chosen["OMP_NUM_THREADS"] = str(settings.devices.num_threads)
    return {name: value for name, value in chosen.items() if name not in inherited}
