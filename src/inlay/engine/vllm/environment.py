"""Environment variables of vLLM's processes. No vLLM: they must stand before it is imported."""

from collections.abc import Mapping

from inlay.engine.settings import EngineSettings


def environment(settings: EngineSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """What an engine's process must be started with, beside what it inherits; what a user has set stays.

    vLLM reports its use to its makers unless told not to; inlay asks nobody's server for anything.
    Non-finite logits are counted, which costs one pass over them: they end the work they belong to.
    """
    chosen = {"VLLM_NO_USAGE_STATS": "1", "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
    if settings.num_threads is not None:
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        chosen["OMP_NUM_THREADS"] = str(settings.num_threads)
    return {name: value for name, value in chosen.items() if name not in inherited}


__all__ = ["environment"]
