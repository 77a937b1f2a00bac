"""All commands: those of the core, and those of its extensions."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from inlay.cli.command import Command
from inlay.cli.nearby import models_nearby
from inlay.cli.settings import (
    DemoSettings,
    FleetFrontendSettings,
    NatsServerSettings,
    ServeSettings,
    StatusSettings,
    WorkerSettings,
)
from inlay.engine.settings import EngineSettings
from inlay.extension import merged, parts
from inlay.telemetry import TelemetrySettings
from inlay.transport.nats.settings import NatsSettings

_ENGINE_FIRST = (
    *("engine", "task", "served_model_name", "dtype", "max_model_len", "max_num_seqs"),
    *("gpu_memory_utilization", "tensor_parallel_size", "enable_prompt_embeds"),
)


def _worker_ahead(
    settings: ServeSettings | WorkerSettings | DemoSettings,
) -> AbstractContextManager[None]:
    """Have the process of a worker begin while the command itself is imported, and checks."""
    # Imported late: help needs none of it.
    from inlay.worker.new_process import begun_ahead

    if isinstance(settings, DemoSettings):
        return begun_ahead(EngineSettings.of(model=""), TelemetrySettings())
    return begun_ahead(settings.engine, settings.telemetry)


_CORE = (
    Command(
        name="serve",
        summary="Serve a model over HTTP.",
        details="Stops on Ctrl-C or SIGTERM: open requests get --drain-timeout seconds to end, a "
        "second Ctrl-C ends at once. Words after -- go to the engine untouched.",
        module="inlay.cli.serve",
        settings=ServeSettings,
        positional=("model",),
        first=(*_ENGINE_FIRST, "host", "port", "api_key"),
        suggest=models_nearby,
        ahead=_worker_ahead,
        extra_args="ENGINE ARGUMENTS",
    ),
    Command(
        name="demo",
        summary="Serve a small bundled model with everything enabled, and show what it does.",
        details="Needs no network. Shows a text question, the same as embeddings, a chat that "
        "mixes both and a soft prompt, each with the server's answer, then keeps serving. With "
        "--images, the same for pictures.",
        module="inlay.cli.demo",
        settings=DemoSettings,
        ahead=_worker_ahead,
    ),
    Command(
        name="nats",
        summary="Run a NATS server set up for a fleet.",
        details="The real server, with JetStream and messages of up to 15 MB. Words after -- go to "
        "it untouched: users, TLS, clusters. Stops on Ctrl-C or SIGTERM.",
        module="inlay.cli.nats",
        settings=NatsServerSettings,
        extra_args="NATS-SERVER ARGUMENTS",
    ),
    Command(
        name="worker",
        summary="Run one engine in a fleet.",
        details="On Ctrl-C or SIGTERM it takes no more requests, and running ones get "
        "--drain-timeout seconds to end; what has not ended then goes on at another worker, as it "
        "does when a worker dies. A second Ctrl-C ends at once.",
        module="inlay.cli.worker",
        settings=WorkerSettings,
        needs_nats=True,
        positional=("model",),
        first=(*_ENGINE_FIRST, "nats", "transport_host", "drain_timeout"),
        suggest=models_nearby,
        ahead=_worker_ahead,
        extra_args="ENGINE ARGUMENTS",
    ),
    Command(
        name="frontend",
        summary="Serve a fleet over HTTP.",
        details="Any number of frontends may serve one fleet. Each needs the models' tokenizers "
        "where the workers have them: the same directories, or names on the hub. Stops as inlay "
        "serve does.",
        module="inlay.cli.frontend",
        settings=FleetFrontendSettings,
        needs_nats=True,
        first=(
            *("nats", "nats_nkey_seed", "host", "port", "api_key", "api_key_file"),
            *("admin_port", "admin_api_key", "request_timeout", "router_policy"),
            *("drain_timeout", "log_format"),
        ),
    ),
    Command(
        name="status",
        summary="Show the workers of a fleet: model, state, load, cache, adapters.",
        details="What their heartbeats say, asked for when it starts; and who is there but "
        "refused, and why.",
        module="inlay.cli.status",
        settings=StatusSettings,
        needs_nats=True,
        borrows=frozenset(NatsSettings.model_fields),
    ),
)


def commands() -> Sequence[Command]:
    """Return all commands in the order help lists them.

    Raises:
        InvalidRequestError: two have one name, or an extension cannot be loaded.
    """
    given: list[tuple[str, Sequence[Command]]] = [("inlay", _CORE)]
    given += [(f"extension {name!r}", some) for name, some in parts("commands")]
    joined = merged(
        "command", ((giver, {each.name: each for each in some}) for giver, some in given)
    )
    # Those of one group stand together, whoever gives them.
    groups: dict[str, list[Command]] = {}
    for command in joined.values():
        groups.setdefault(command.name.split()[0], []).append(command)
    return tuple(command for group in groups.values() for command in group)


def known_variables() -> set[str]:
    """Every `INLAY_*` variable that some command reads."""
    return {variable for command in commands() for variable in command.options.variables}
