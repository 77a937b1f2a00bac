"""What runs a model: one package or module an engine, all behind `inlay.protocol.work.Engine`.

Importing this imports no engine: each brings its heavy libraries only where it is created.
"""

from collections.abc import Mapping

from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.protocol.work import Engine

__all__ = ["Engine", "EngineSettings", "create", "environment"]


def create(settings: EngineSettings, secret: Secret) -> Engine:
    """The engine `settings` names, not started.

    Raises:
        InvalidRequestError: the settings ask for what the engine cannot do.
    """
    if settings.engine == "echo":
        from inlay.engine.echo import EchoEngine

        return EchoEngine(settings, secret)
    if settings.task != "generate":
        from inlay.engine.embed.engine import EmbedEngine

        return EmbedEngine(settings, secret)
    from inlay.engine.torch.engine import TorchEngine

    return TorchEngine(settings, secret)


def environment(settings: EngineSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables the engine's process must be started with, beside those it inherits."""
    if settings.engine == "echo":
        return {}
    from inlay.engine.torch.threads import environment as torch_environment

    return torch_environment(inherited)
