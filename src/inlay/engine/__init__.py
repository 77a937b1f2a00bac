"""Engines: everything that runs a model, one package or module each.

All implement the protocols of `api.py` (`GenerateEngine`, `EmbeddingEngine`, `AdapterEngine`,
`SleepingEngine`). Importing this package imports no engine; each loads its heavy libraries when it
is created.

`settings.py` is the one declaration of a worker's engine flags. `create` chooses the engine:
`torch` (built in), `embed` (embeddings and scores with transformers), `vllm`, `sglang`, and
`echo.py` (no model, for tests). Shared by all: `admission.py` (checks of requests before they cost
anything), `task.py` (the task of `--task auto`), `weights.py` (model files and their identity),
`model_files.py` (facts read from them), `ranks.py` (data-parallel ranks: each is a worker process
of its own, so that a router knows whose cache a prompt is in), `fairness.py` (shares of clients),
`places.py` (the wait for a place, before vLLM and SGLang), `grammar` (cost and trial of grammars).

KV cache events exist in two forms. For others they are vLLM's own events over ZeroMQ
(`kv_events.py`, `kv_publisher.py`, `kv_subscriber.py`, `kv_events_config.py`): blocks are named by
digests of their digests under a separate key, and token ids are left out unless
`--kv-events-token-ids` is given. For routers they are blocks of the routing chain: the torch engine
names its pages by it, and `kv_chain.py` translates vLLM's events into it. Events never block an
engine: overflowing batches are dropped, and the missing sequence number shows it.
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
    """Refuse unsupported `settings` before a process is started or a model is loaded.

    Raises:
        InvalidRequestError: the settings belong to another engine, or contradict each other.
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
            "--gpu-memory-utilization is for the torch and vllm engines, not for "
            f"{settings.engine}{instead}",
            param="gpu_memory_utilization",
        )
    if settings.engine != "sglang" and settings.engine_arguments:
        raise InvalidRequestError(
            f"--engine-arguments is for the vllm and sglang engines; the {settings.engine} engine "
            "takes none",
            param="engine_arguments",
        )
    for name in _VLLM_ALONE:
        if getattr(settings, name):
            raise InvalidRequestError(
                f"--{name.replace('_', '-')} is for the vllm engine; the {settings.engine} engine "
                "takes none",
                param=name,
            )


def create(settings: EngineSettings, secret: Secret) -> Engine:
    """Create the engine that `settings` names, not started; `--task auto` is resolved here.

    Raises:
        InvalidRequestError: unsupported settings, an engine that is not installed, or no such
            model.
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
            "vLLM is not installed in this environment; --engine-python names the Python of one "
            "where it is",
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
        "SGLang is not installed in this environment; --engine-python names the Python of one "
        "where it is",
    )
    if settings.task != "generate":
        from inlay.engine.embed.engine import EmbedEngine
        from inlay.engine.sglang.embedding import SglangEmbedding

        return EmbedEngine(settings, SglangEmbedding(settings, secret))
    from inlay.engine.sglang.engine import SglangEngine

    return SglangEngine(settings, secret)


def _need(module: str, otherwise: str) -> None:
    """Import `module`. Raises `InvalidRequestError` with `otherwise` if it is not installed."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InvalidRequestError(otherwise) from error


def environment(settings: EngineSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to add to those the engine's process inherits."""
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
