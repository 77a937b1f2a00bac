"""What runs a model: one package or module an engine, all behind `inlay.engine.api.Engine`.

Importing this imports no engine: each brings its heavy libraries only where it is created.
"""

from collections.abc import Mapping
from importlib import import_module

from inlay.digest import Secret
from inlay.engine.api import Engine
from inlay.engine.ranks import check_ranks
from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError

__all__ = ["Engine", "EngineSettings", "check", "create", "environment"]

_VLLM_ALONE = ("kv_transfer_config", "connector")


def check(settings: EngineSettings) -> None:
    """Say what the engine cannot do with `settings`, before a process is started and a model loaded for it.

    Raises:
        InvalidRequestError: they ask for what another engine has, or contradict themselves.
    """
    check_ranks(settings)
    if settings.engine == "vllm":
        from inlay.engine.vllm.connectors import transfer_config

        transfer_config(settings)
        return
    if settings.engine == "sglang" and (settings.task == "score" or settings.enable_lora):
        wanted = "--enable-lora" if settings.enable_lora else "--task score"
        raise InvalidRequestError(
            f"{wanted} is for other engines: behind inlay SGLang generates and embeds"
        )
    if settings.engine in ("sglang", "echo") and settings.gpu_memory_utilization is not None:
        instead = (
            "; --mem-fraction-static after -- is its own" if settings.engine == "sglang" else ""
        )
        raise InvalidRequestError(
            f"--gpu-memory-utilization is for the torch and vllm engines, not for {settings.engine}{instead}",
            param="gpu_memory_utilization",
        )
    if settings.engine != "sglang" and settings.engine_arguments:
        raise InvalidRequestError(
            f"--engine-arguments is for the vllm and sglang engines; the {settings.engine} engine takes none",
            param="engine_arguments",
        )
    for name in _VLLM_ALONE:
        if getattr(settings, name):
            raise InvalidRequestError(
                f"--{name.replace('_', '-')} is for the vllm engine; the {settings.engine} engine takes none",
                param=name,
            )


def create(settings: EngineSettings, secret: Secret) -> Engine:
    """The engine `settings` names, not started; the task that is `auto` is chosen here.

    Raises:
        InvalidRequestError: the settings ask for what the engine cannot do, it is not installed, or
            there is no model.
    """
    from inlay.engine.task import with_task

    settings = with_task(settings)
    check(settings)
    if settings.engine == "echo":
        from inlay.engine.echo import EchoEngine

        return EchoEngine(settings, secret)
    if settings.engine == "vllm":
        _need(
            "vllm",
            "vLLM is not installed in this environment; --engine-python names the Python of one where it is",
        )
        if settings.task != "generate":
            from inlay.engine.embed.engine import EmbedEngine
            from inlay.engine.vllm.pooling import VllmPooling

            return EmbedEngine(settings, VllmPooling(settings, secret))
        from inlay.engine.vllm.engine import VllmEngine

        return VllmEngine(settings, secret)
    if settings.engine == "sglang":
        return _sglang(settings, secret)
    _need("torch", "torch is not installed in this environment: pip install 'inlay[torch]'")
    if settings.task != "generate":
        from inlay.engine.embed.engine import EmbedEngine
        from inlay.engine.embed.local_model import LocalModel

        return EmbedEngine(settings, LocalModel(settings, secret))
    from inlay.engine.torch.engine import TorchEngine

    return TorchEngine(settings, secret)


def _sglang(settings: EngineSettings, secret: Secret) -> Engine:
    _need(
        "sglang",
        "SGLang is not installed in this environment; --engine-python names the Python of one where it is",
    )
    if settings.task != "generate":
        from inlay.engine.embed.engine import EmbedEngine
        from inlay.engine.sglang.embedding import SglangEmbedding

        return EmbedEngine(settings, SglangEmbedding(settings, secret))
    from inlay.engine.sglang.engine import SglangEngine

    return SglangEngine(settings, secret)


def _need(module: str, otherwise: str) -> None:
    """Import `module`. Raises `InvalidRequestError` with `otherwise` where it is not installed."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InvalidRequestError(otherwise) from error


def environment(settings: EngineSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables the engine's process must be started with, beside those it inherits."""
    if settings.engine == "echo":
        return {}
    if settings.engine == "vllm":
        from inlay.engine.vllm.environment import environment as vllm_environment

        return vllm_environment(settings, inherited)
    if settings.engine == "sglang":
        from inlay.engine.sglang.environment import environment as sglang_environment

        return sglang_environment(settings, inherited)
    from inlay.engine.torch.threads import environment as torch_environment

    return torch_environment(inherited)
