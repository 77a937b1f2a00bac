"""What runs a model: one package or module an engine, all behind `inlay.protocol.work.Engine`.

Importing this imports no engine: each brings its heavy libraries only where it is created.
"""

from collections.abc import Mapping

from inlay.digest import Secret
from inlay.engine.ranks import check_ranks
from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError
from inlay.protocol.work import Engine

__all__ = ["Engine", "EngineSettings", "check", "create", "environment"]

_VLLM_ALONE = ("engine_arguments", "kv_transfer_config", "connector")


def check(settings: EngineSettings) -> None:
    """Say what the engine cannot do with `settings`, before a process is started and a model loaded for it.

    Raises:
        InvalidRequestError: they ask for what another engine has, or contradict themselves.
    """
    check_ranks(settings)
    if settings.engine == "vllm":
        from inlay.engine.vllm.connectors import transfer_config

        if settings.task != "generate":
            raise InvalidRequestError(
                f"--task {settings.task} is for the built-in engine: behind inlay vLLM generates",
                param="task",
            )
        transfer_config(settings)
        return
    for name in _VLLM_ALONE:
        if getattr(settings, name):
            raise InvalidRequestError(
                f"--{name.replace('_', '-')} is for the vllm engine; the {settings.engine} engine takes none",
                param=name,
            )


def create(settings: EngineSettings, secret: Secret) -> Engine:
    """The engine `settings` names, not started.

    Raises:
        InvalidRequestError: the settings ask for what the engine cannot do, or it is not installed.
    """
    check(settings)
    if settings.engine == "echo":
        from inlay.engine.echo import EchoEngine

        return EchoEngine(settings, secret)
    if settings.engine == "vllm":
        try:
            import vllm  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise InvalidRequestError(
                "vLLM is not installed in this environment; --engine-python names the Python of one where it is"
            ) from error
        from inlay.engine.vllm.engine import VllmEngine

        return VllmEngine(settings, secret)
    if settings.task != "generate":
        from inlay.engine.embed.engine import EmbedEngine
        from inlay.engine.embed.local_model import LocalModel

        return EmbedEngine(settings, LocalModel(settings, secret))
    from inlay.engine.torch.engine import TorchEngine

    return TorchEngine(settings, secret)


def environment(settings: EngineSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables the engine's process must be started with, beside those it inherits."""
    if settings.engine == "echo":
        return {}
    if settings.engine == "vllm":
        from inlay.engine.vllm.environment import environment as vllm_environment

        return vllm_environment(settings, inherited)
    from inlay.engine.torch.threads import environment as torch_environment

    return torch_environment(inherited)
