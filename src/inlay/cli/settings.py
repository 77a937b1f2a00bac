"""The settings class of each command: its values, and the models of the rooms it joins."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from inlay.engine.extension_options import with_extensions
from inlay.engine.settings import EngineSettings
from inlay.http.settings import FrontendSettings
from inlay.router.settings import RouterSettings
from inlay.store.settings import BatchSettings, FleetStoreSettings, ResponseSettings, StoreSettings
from inlay.telemetry import TelemetrySettings
from inlay.transport.embeds_cache import KEPT_BYTES
from inlay.transport.nats.settings import NatsSettings


@with_extensions("serve")
class ServeSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay serve`: one engine, or those of a pipeline, and the HTTP in front of it."""

    engine: EngineSettings = Field(title="Model and engine")
    frontend: FrontendSettings = Field(title="HTTP")
    router: RouterSettings = Field(default_factory=RouterSettings, title="Routing")
    store: StoreSettings = Field(default_factory=StoreSettings, title="Stored embeddings")
    batches: BatchSettings = Field(default_factory=BatchSettings, title="Files and batches")
    responses: ResponseSettings = Field(default_factory=ResponseSettings, title="Kept responses")
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings, title="Logs and traces")


class NatsServerSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay nats`: a NATS server with what a fleet needs of one."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for other machines."""
    port: int = Field(default=4222, ge=1, le=65535)
    """Port to listen on."""
    max_payload: int = Field(default=15 * 1024 * 1024, ge=64 * 1024, le=64 * 1024 * 1024)
    """Bytes of a message at most. Prompts of any size go through any value."""
    store_dir: Path | None = None
    """Data directory of the server: cards, the namespace's secret, stored prompts.
    $XDG_STATE_HOME/inlay/nats-PORT, or ~/.local/state in its place, unless set."""
    credentials: bool | None = None
    """Ask members for the key of nats_nkey_seed. Unless set, yes where other machines can reach the
    server and the words after -- set up no access of their own."""
    nats_nkey_seed: Path | None = None
    """File of the nkey seed that members log in with, made when there is none; members.nk in the
    store directory unless set."""


@with_extensions("worker")
class WorkerSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay worker`: one engine in a fleet."""

    engine: EngineSettings = Field(title="Model and engine")
    enable_prompt_embeds: bool = Field(default=False, title="Model and engine")
    """Accept embeddings as prompts; frontends follow the setting of each worker."""
    fleet: NatsSettings = Field(default_factory=NatsSettings, title="Fleet")
    drain_timeout: float = Field(default=30.0, ge=0, title="Fleet")
    """Seconds that running requests may take to end after the first signal; the rest continue at
    other workers."""
    health_port: int | None = Field(default=None, ge=0, le=65535, title="Fleet")
    """Port that answers GET /live while this process runs and GET /ready while its engines take
    requests, at --transport-bind or --transport-host, else 127.0.0.1; none unless set."""
    health_process_timeout: float = Field(default=20.0, gt=0, title="Fleet")
    """Seconds after which an engine's process that answers nothing is ended and started again; time
    in which the whole machine stood still does not count."""
    min_workers: int | None = Field(default=None, ge=1, title="Fleet")
    """Ready workers with these weights that replace older weights of the same name; more than the
    older ones have unless set."""
    adapters_file: Path | None = Field(default=None, title="Fleet")
    """YAML file of the adapters that this worker is to have: a list of name, path and sha256. They
    are loaded, and unloaded once they leave it, whenever it changes."""
    weight: float | None = Field(default=None, ge=0, le=1e6, allow_inf_nan=False, title="Fleet")
    """Share of these weights in requests for their name, against 1 of weights without one: 0.05
    takes 1 in 21, 0 none."""
    secret_file: Path | None = Field(default=None, title="Fleet")
    """File of the namespace's 32-byte secret, the same for all; one made and kept in NATS unless
    set."""
    prompt_store_memory_bytes: int = Field(default=KEPT_BYTES, ge=0, title="Fleet")
    """Memory for the rows of stored prompts that were used here, so that their next use moves none;
    for each engine. 0 keeps none."""
    transport_host: str | None = Field(default=None, title="Fleet")
    """Name or IP address at which frontends reach this machine; that of its way to NATS unless
    set."""
    transport_bind: str | None = Field(default=None, title="Fleet")
    """Address to listen on for frontends, such as 0.0.0.0; --transport-host unless set."""
    transport_port: int = Field(default=0, ge=0, le=65535, title="Fleet")
    """TCP port for frontends, of the first engine; further engines take the next ports. 0: any free
    one."""
    transport_dial: bool = Field(default=False, title="Fleet")
    """Connect to the frontends, as behind NAT, where they cannot connect here. They need
    --transport-host."""
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings, title="Logs and traces")


class FleetHttpSettings(FrontendSettings, frozen=True):
    """The HTTP side of a fleet's frontend."""

    enable_prompt_embeds: bool = True
    """Accept embeddings as prompts for the models whose workers do (inlay worker
    --enable-prompt-embeds)."""


class FleetFrontendSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay frontend`: HTTP in front of a fleet."""

    fleet: NatsSettings = Field(default_factory=NatsSettings, title="Fleet")
    frontend: FleetHttpSettings = Field(default_factory=FleetHttpSettings, title="HTTP")
    router: RouterSettings = Field(default_factory=RouterSettings, title="Routing")
    store: FleetStoreSettings = Field(default_factory=FleetStoreSettings, title="Stored embeddings")
    batches: BatchSettings = Field(default_factory=BatchSettings, title="Files and batches")
    responses: ResponseSettings = Field(default_factory=ResponseSettings, title="Kept responses")
    transport_host: str | None = Field(default=None, title="Fleet")
    """Name or IP address at which workers with --transport-dial reach this machine; such workers
    are not used unless set."""
    transport_bind: str | None = Field(default=None, title="Fleet")
    """Address to listen on for such workers; --transport-host unless set."""
    transport_port: int = Field(default=0, ge=0, le=65535, title="Fleet")
    """TCP port for such workers. 0: any free one."""
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings, title="Logs and traces")


class StatusSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay status`: the workers of a fleet."""

    fleet: NatsSettings = Field(default_factory=NatsSettings, title="Fleet")
    watch: bool = False
    """Show it repeatedly, until Ctrl-C."""
    interval: float = Field(default=1.0, ge=0.1)
    """Seconds between two tables."""
    output_json: bool = False
    """The same as --output-format json."""
    output_format: Literal["text", "json"] = "text"
    """Print a table, or JSON, one line each time."""


class DemoSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay demo`."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """Port to listen on; 0 takes a free one. 8000 or, where that is taken, a free one unless
    set."""
    images: bool = False
    """Serve a model that reads pictures of digits instead, and show images, image embeddings and
    prompt embeddings in its chats."""
    draw: bool = False
    """Serve a pipeline of two models instead, which answers a question and draws the answer. Needs
    diffusers."""
    keep_serving: bool = True
    """Keep serving after the demonstration until Ctrl-C, instead of exiting."""
