"""The settings class of each command: its values, and the models of the rooms it joins."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, SecretStr

from inlay.engine.settings import DtypeName, EngineSettings
from inlay.http.settings import FrontendSettings
from inlay.router.settings import RouterSettings
from inlay.store.settings import FleetStoreSettings, StoreSettings
from inlay.telemetry import TelemetrySettings
from inlay.transport.embeds_cache import KEPT_BYTES
from inlay.transport.nats.settings import NatsSettings


class ServeSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay serve`: one engine, or those of a pipeline, and the HTTP in front of it."""

    engine: EngineSettings = Field(title="Model and engine")
    deploy: Path | None = Field(default=None, title="Model and engine")
    """Deployment of the stages of a pipeline, where the model is a graph, GRAPH.yaml: engine,
    workers, device and the like of each stage."""
    frontend: FrontendSettings = Field(title="HTTP")
    router: RouterSettings = Field(default_factory=RouterSettings, title="Routing")
    store: StoreSettings = Field(default_factory=StoreSettings, title="Stored embeddings")
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


class WorkerSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay worker`: one engine in a fleet."""

    engine: EngineSettings = Field(title="Model and engine")
    stage: str | None = Field(default=None, title="Model and engine")
    """Stage of the pipeline that the worker is, where the model is a graph, GRAPH.yaml."""
    deploy: Path | None = Field(default=None, title="Model and engine")
    """Deployment of the stages of a pipeline, where the model is a graph, GRAPH.yaml: engine,
    workers, device and the like of each stage."""
    enable_prompt_embeds: bool = Field(default=False, title="Model and engine")
    """Accept embeddings as prompts; frontends follow the setting of each worker."""
    fleet: NatsSettings = Field(default_factory=NatsSettings, title="Fleet")
    drain_timeout: float = Field(default=30.0, ge=0, title="Fleet")
    """Seconds that running requests may take to end after the first signal; the rest continue at
    other workers."""
    health_process_timeout: float = Field(default=20.0, gt=0, title="Fleet")
    """Seconds after which an engine's process that answers nothing is ended and started again; time
    in which the whole machine stood still does not count."""
    min_workers: int | None = Field(default=None, ge=1, title="Fleet")
    """Ready workers with these weights that replace older weights of the same name; more than the
    older ones have unless set."""
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


class DoctorSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay doctor`: this machine, what it reaches, and the numbers of a model."""

    model: str | None = Field(default=None, title="Model")
    """Directory of a model, or its name on the hub: it is loaded, compared with its own code in
    full, and the comparison is printed. Needs torch."""
    dtype: DtypeName = Field(default="auto", title="Model")
    """Activation dtype; auto takes the checkpoint's, half is float16, float is float32."""
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", title="Model")
    """Device the model runs on."""
    fleet: NatsSettings = Field(default_factory=NatsSettings, title="Fleet")
    reach: list[str] = []
    """Connect to these, HOST:PORT: workers, frontends, a collector."""
    free_ports: list[int] = []
    """Ports that a server is to listen on here, and that must be free."""
    ssl_certfile: Path | None = None
    """Certificate chain of HTTPS to check, PEM."""
    ssl_keyfile: Path | None = None
    """Its private key; in the certificate's file unless set."""
    output_json: bool = False
    """The same as --output-format json."""
    output_format: Literal["text", "json"] = "text"
    """Print a list for people, or JSON."""


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


class EncodeSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay embeds encode`."""

    model: str | None = None
    """Directory of the model, or its name on the hub; with url, its name there."""
    image: Path | None = None
    """Image to encode, by a server (url) or by the model's own encoder here, which needs torch. Its
    grid, where it has one, is in the safetensors file."""
    audio: Path | None = None
    """Audio to encode, WAV, FLAC or MP3, as image."""
    detail: Literal["auto", "low", "high"] | None = None
    """Detail of the image; low takes fewer positions."""
    url: str | None = None
    """Base URL of the server that encodes it, as OpenAI clients take it."""
    api_key: SecretStr | None = None
    """Key to ask that server with."""
    text: str | None = None
    """Text to encode; standard input is read when neither this nor messages is given."""
    messages: Path | None = None
    """JSON file of chat messages, - for standard input; the model's chat template is applied."""
    format: Literal["safetensors", "torch", "npy"] = "safetensors"
    """Container. torch is read by vLLM as well; npy knows no bfloat16 and carries no table id."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """Write the same values in another dtype that holds them, as npy needs for a bfloat16 model;
    auto is the table's own."""
    base64: bool = False
    """Write base64 text, as prompt_embeds takes it, instead of bytes."""
    output: Path | None = None
    """File to write; standard output unless set."""
    output_format: Literal["text", "json"] = "text"
    """Say what was written as text, or as JSON on standard output; JSON needs --output."""


class InspectSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay embeds inspect`."""

    file: Path
    """File of embeddings, bytes or base64; - is standard input."""
    model: str | None = None
    """Directory of the model, or its name on the hub. With it the nearest tokens are shown."""
    top: int = Field(default=1, ge=1, le=100)
    """Nearest tokens shown for each row."""
    output_format: Literal["text", "json"] = "text"
    """Print a table, or JSON: a list with an object for each prompt."""


class UploadSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay embeds upload`."""

    file: Path
    """File of embeddings, bytes or base64, or an image; - is standard input."""
    url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the server, as OpenAI clients take it."""
    api_key: SecretStr | None = None
    """Key to ask with; what is uploaded is found with this key alone."""
    model: str | None = None
    """Check the embeddings against this model at once."""
    pin: bool = False
    """Keep them until they are unpinned or deleted."""
    output_json: bool = False
    """The same as --output-format json."""
    output_format: Literal["text", "json"] = "text"
    """Print the id, or all the server says as JSON."""


class ChatSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay chat`."""

    model: str | None = None
    """Directory of a model, or its name on the hub, to serve while the chat lasts. A server that
    runs already is asked unless set."""
    url: str | None = None
    """Base URL of the server, as OpenAI clients take it. OPENAI_BASE_URL and OPENAI_API_KEY are
    used unless set, then http://127.0.0.1:8000/v1."""
    api_key: SecretStr | None = None
    """Key to ask with."""
    model_name: str | None = None
    """Name of the model at the server; its first one unless set."""
    once: str | None = None
    """Ask this one question and exit; - reads it from standard input."""
    embeds: list[Path] = []
    """Files of embeddings to put before the first message, as /attach does."""
    system_prompt: str | None = None
    """System message of the chat."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of an answer at most; the server's default unless set."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature; the model's unless set."""
    seed: int | None = None
    """Seed of sampling; a new one unless set."""
    history: bool = True
    """Keep what was typed for later chats, in $XDG_STATE_HOME/inlay/chat_history or below
    ~/.local/state."""
    output_format: Literal["text", "json"] = "text"
    """Print text for people, or JSON for programs on standard output."""


class WorkloadSettings(BaseModel, frozen=True, defer_build=True):
    """Requests of a measurement."""

    prompts: Literal["text", "embeds", "refs", "images"] = "text"
    """Prompts made at random: text, embeddings sent with each request, embeddings uploaded before
    and sent by reference, or pictures with a question."""
    endpoint: Literal["completions", "chat"] | None = None
    """Route to ask. completions unless set, chat for images."""
    num_prompts: int = Field(default=100, ge=1, le=1_000_000)
    """Number of requests."""
    input_len: int = Field(default=128, ge=1, le=10_000_000)
    """Tokens or rows of a prompt."""
    output_len: int = Field(default=64, ge=1, le=1_000_000)
    """Tokens of an answer; its end is ignored."""
    prefix_len: int = Field(default=0, ge=0)
    """Of these, at the beginning, the same in all prompts."""
    image_size: int = Field(default=224, ge=1, le=4096)
    """Width and height of pictures, in pixels."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompts and arrivals."""


class BenchSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay bench`."""

    url: list[str] = Field(default=[], title="Servers")
    """Base URL of the server, as OpenAI clients take it. OPENAI_BASE_URL and OPENAI_API_KEY are
    used unless set, then http://127.0.0.1:8000/v1. Two are compared: the same requests, in rounds
    that alternate."""
    api_key: SecretStr | None = Field(default=None, title="Servers")
    """Key to ask with, the same for both servers."""
    model_name: str | None = Field(default=None, title="Servers")
    """Name of the model at the servers; the first one of each unless set."""
    workload: WorkloadSettings = Field(default_factory=WorkloadSettings, title="Requests")
    bodies: Path | None = Field(default=None, title="Requests")
    """File of request bodies, one JSON object a line, to send instead of random prompts; as inlay
    bench write makes it. - is standard input."""
    request_rate: float | None = Field(default=None, gt=0, title="Load")
    """Requests per second, at random times (open loop); all at once unless set."""
    burstiness: float = Field(default=1.0, gt=0, title="Load")
    """Shape of the times between requests, a gamma distribution; 1 is a Poisson process, less has
    more bursts."""
    max_concurrency: int | None = Field(default=None, ge=1, title="Load")
    """Requests that run at a time at most (closed loop without --request-rate)."""
    num_warmups: int = Field(default=1, ge=0, title="Load")
    """Requests before the first, not measured."""
    rounds: int | None = Field(default=None, ge=1, le=1000, title="Load")
    """Times that all requests are sent; 1 unless set, 3 with two servers."""
    request_timeout: float = Field(default=600.0, gt=0, title="Load")
    """Seconds of a request, then it has failed."""
    goodput: list[str] = Field(default=[], title="Report")
    """Bounds in milliseconds that a good request keeps: ttft:200 tpot:50 e2el:3000."""
    metric_percentiles: list[float] = Field(default_factory=lambda: [99.0], title="Report")
    """Percentiles to report."""
    output_format: Literal["text", "json"] = Field(default="text", title="Report")
    """Print text for people, or JSON for programs on standard output."""


class BenchWriteSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay bench write`."""

    url: str | None = None
    """Base URL of the server, as OpenAI clients take it. OPENAI_BASE_URL and OPENAI_API_KEY are
    used unless set, then http://127.0.0.1:8000/v1."""
    api_key: SecretStr | None = None
    """Key to ask with."""
    model_name: str | None = None
    """Name of the model at the server; its first one unless set."""
    workload: WorkloadSettings = Field(default_factory=WorkloadSettings, title="Requests")
    stream: bool = True
    """Ask for a stream, with usage at its end."""
    output: Path | None = None
    """File to write; standard output unless set."""
    output_format: Literal["text", "json"] = "text"
    """Say how many were written as text, or as JSON on standard output; JSON needs --output."""


class CompletionSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay completion`."""

    shell: Literal["bash", "zsh", "fish"]
    """bash, zsh or fish."""


class ConvertSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay embeds convert`."""

    file: Path
    """File of embeddings, bytes or base64; - is standard input."""
    format: Literal["safetensors", "torch", "npy"] = "safetensors"
    """Container. torch is read by vLLM as well; npy knows no bfloat16 and carries no table id."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """Data type of the values, rounded where it is narrower; auto keeps theirs."""
    base64: bool = False
    """Write base64 text, as prompt_embeds takes it, instead of bytes."""
    output: Path | None = None
    """File to write; standard output unless set."""
    output_format: Literal["text", "json"] = "text"
    """Say what was written as text, or as JSON on standard output; JSON needs --output."""


class ConvertModelSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay convert`."""

    source: Path
    """Directory of a model, or a file of weights: by torch.save (.bin, .pt, .pth, .ckpt), or
    .gguf."""
    output: Path | None = None
    """Directory to make; unless set, weights go beside those that are read, and the model of a GGUF
    file into a directory of its name."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of what was GGUF; auto is bfloat16. Other weights keep theirs."""
    output_format: Literal["text", "json"] = "text"
    """Say what was made as text, or as JSON."""


class AuditSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay embeds audit`."""

    model: str = Field(title="Texts")
    """Directory of the model that rows are for, or its name on the hub. Only the tokenizer and the
    embedding table are read."""
    texts: Path = Field(title="Texts")
    """File of texts, one a line, or a JSON object a line: text and, where known, names and others,
    entities that stand in it, and the right answer. - is standard input."""
    public: Path | None = Field(default=None, title="Texts")
    """File of texts that attackers know, as --texts. Unless set, they know two thirds of --texts,
    and the last third is read."""
    plain: bool = Field(default=False, title="Texts")
    """A text is a whole prompt, not a user's message in the model's chat template."""
    transform: list[str] = Field(default=[], title="Attack")
    """Transforms of the table's rows before they are sent, each audited: none, noise:LEVEL (in
    units of the median norm), shuffle, permute, rotate, permute:folded, rotate:folded,
    project:WIDTH, drop:SHARE, hidden:LAYER, learned, or MODULE:FUNCTION of Python. none,
    noise:1, noise:4, rotate and shuffle unless set."""
    transform_command: list[str] = Field(default=[], title="Attack")
    """Command that reads rows as safetensors on standard input and writes those to send on its
    output; audited too."""
    rows: Path | None = Field(default=None, title="Attack")
    """Safetensors file of rows that were made of --texts; audited too."""
    attackers: list[str] = Field(default=[], title="Attack")
    """Attackers to try; all of them unless set: nearest, whitened, signature, sorted, codebook,
    procrustes, ridge, least-squares, bigram, resends, resends-pairs, reordered, and with torch
    inverter, beam and hidden-search; the last two of a directory with at most 4 GiB of weights.
    fast is all but those with torch. Guesses without the rows are always beside them."""
    resends: int = Field(default=8, ge=1, le=64, title="Attack")
    """Times that a text is sent, as chats send their history: new noise averages out."""
    seed: int = Field(default=0, ge=0, title="Attack")
    """Seed of keys and noise."""
    answers: bool = Field(default=False, title="Answers")
    """Compare the model's answers to the same rows with those to the table's own, computed here
    with torch, and how far their distributions drift."""
    url: str | None = Field(default=None, title="Answers")
    """Base URL of a server of the model, as OpenAI clients take it. Its answers to the same rows
    are compared with those to the table's own."""
    api_key: SecretStr | None = Field(default=None, title="Answers")
    """Key to ask with."""
    model_name: str | None = Field(default=None, title="Answers")
    """Name of the model at the server; its first one unless set."""
    fail_above: list[str] = Field(default=[], title="Report")
    """Exit with status 1 where the upper limit of the worst case is above a share: METRIC=SHARE,
    with a metric of tokens, any-order, names, others, unseen, exact."""
    svg: Path | None = Field(default=None, title="Report")
    """Write the shares as a picture (SVG) too."""
    output_format: Literal["text", "json"] = Field(default="text", title="Report")
    """Print text for people, or JSON for programs on standard output."""
