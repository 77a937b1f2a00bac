"""Engines: everything that runs a model, one package or module each.

All implement the protocols of `api.py` (`Engine`, `GenerateEngine`, `AdapterEngine`,
`SleepingEngine`). Importing this package imports no engine; each loads its heavy libraries when it
is created.

`settings.py` is the one declaration of a worker's engine flags, to which `extension_options.py`
adds those of extensions, `spec.py` the registry that
`create` chooses from: `torch` (built in), `embed` (embeddings and scores with transformers),
`vllm`, `sglang` and `echo.py` (no model, for tests), and those of extensions; `options.py` says
what each refuses. Shared by all: `admission.py` (checks of requests before they cost anything),
`task.py` (the task of `--task auto`), `weights.py` (model files and their identity),
`model_files.py` (facts read from them), `ranks.py` (data-parallel ranks: each is a worker process
of its own, so that a router knows whose cache a prompt is in), `fairness.py` (shares of clients),
`slots.py` (the wait for a place, before vLLM and SGLang), `grammar` (cost and trial of grammars),
`pictures.py` and `decoding.py` (pictures from files, within a budget of bytes), `videos.py` (MP4
and WebM, decoded by a process that runs `video_process.py`).

KV cache events exist in two forms. For others they are vLLM's own events over ZeroMQ
(`kv_events.py`, `kv_publisher.py`, `kv_subscriber.py`, `kv_events_config.py`): blocks are named by
digests of their digests under a separate key, and token ids are left out unless
`--kv-events-token-ids` is given. For routers they are blocks of the routing chain: the torch engine
names its pages by it, and `kv_chain.py` translates vLLM's events into it. Events never block an
engine: overflowing batches are dropped, and the missing sequence number shows it.
"""

from inlay.engine.api import Engine
from inlay.engine.options import check_options, environment, spec_of
from inlay.engine.ranks import check_ranks
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret

__all__ = ["Engine", "EngineSettings", "check", "create", "environment"]


def check(settings: EngineSettings) -> None:
    """Refuse unsupported `settings` before a process is started or a model is loaded.

    Raises:
        InvalidRequestError: the settings belong to another engine, or contradict each other.
    """
    check_ranks(settings.devices)
    check_options(settings)


def create(settings: EngineSettings, secret: Secret) -> Engine:
    """Create the engine that `settings` names, not started; `--task auto` is resolved here.

    Raises:
        InvalidRequestError: unsupported settings, an engine that is not installed, or no such
            model.
    """
    from inlay.engine.task import with_task

    settings = with_task(settings)
    check(settings)
    spec = spec_of(settings)
    engine: Engine
    if settings.model.task == "encode":
        engine = spec.load(spec.encode)(settings, secret)
    elif settings.model.task != "generate" and spec.pooling:
        model = spec.load(spec.pooling)(settings, secret)
        from inlay.engine.embed.engine import EmbedEngine

        engine = EmbedEngine(settings, model)
    else:
        engine = spec.load(spec.generate)(settings, secret)
    return engine
