"""The settings class of each tool: its values, and the models of the rooms it joins."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, SecretStr

from inlay.engine.sections import DtypeName
from inlay.transport.nats.settings import NatsSettings


class DoctorSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay doctor`: this machine, what it reaches, and the numbers of a model."""

    model: str | None = Field(default=None, title="Model")
    """Directory of a model, or its name on the hub: it is loaded, compared with its own code in
    full, and the comparison is printed. Needs torch."""
    dtype: DtypeName = Field(default="auto", title="Model")
    """Activation dtype; auto takes the checkpoint's, half is float16, float is float32."""
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", title="Model")
    """Device the model runs on."""
    quantization: Literal["int8", "q4_k"] | None = Field(default=None, title="Model")
    """As the flag of the same name of `inlay serve`."""
    quality: Path | None = Field(default=None, title="Model")
    """File of text, 20 KB or more: print perplexity and divergence with the weights and activations
    rounded as served, against the files' own. Both models are in memory at once."""
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


class EncodeSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay embeds encode`."""

    model: str | None = None
    """Directory of the model, or its name on the hub; with url, its name there."""
    image: Path | None = None
    """Image to encode, by a server (url) or by the model's own encoder here, which needs torch. Its
    grid, where it has one, is in the safetensors file."""
    audio: Path | None = None
    """Audio to encode, as image."""
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


class PlanSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay plan`."""

    url: str | None = Field(default=None, title="Worker")
    """Base URL of a server with one worker, which is measured: inlay serve. OPENAI_BASE_URL and
    OPENAI_API_KEY are used unless set, then http://127.0.0.1:8000/v1."""
    api_key: SecretStr | None = Field(default=None, title="Worker")
    """Key to ask with."""
    model_name: str | None = Field(default=None, title="Worker")
    """Name of the model at the server; its first one unless set."""
    step_times: Path | None = Field(default=None, title="Worker")
    """File of an earlier measurement, what this command prints with -o json; no server is asked."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096, title="Worker")
    """Sequences that a worker runs, as its own flag says."""
    max_num_batched_tokens: int = Field(default=2048, ge=16, title="Worker")
    """Prompt positions in a step, as its own flag says."""
    request_rate: list[Annotated[float, Field(gt=0)]] = Field(default=[1.0], title="Load")
    """Requests per second, at random times; several are planned one after the other."""
    input_len: int = Field(default=1024, ge=1, le=10_000_000, title="Load")
    """Positions of a prompt, on average."""
    output_len: int = Field(default=256, ge=1, le=1_000_000, title="Load")
    """Tokens of an answer, on average."""
    cached_share: float = Field(default=0.0, ge=0, le=1, title="Load")
    """Share of a prompt's positions that its worker has cached: vllm:prefix_cache_hits_total by
    vllm:prefix_cache_queries_total."""
    spread: float = Field(default=0.5, ge=0, le=3, title="Load")
    """Standard deviation of both lengths, as a share of their mean."""
    targets: list[str] = Field(default=["ttft:1000", "itl:100"], title="Load")
    """Bounds in milliseconds that 19 of 20 keep: of the first token, and between two tokens."""
    fetch_share: float | None = Field(default=None, ge=0, title="Load")
    """Plan prefill and decode workers too: time to fetch a position, as a share of computing it
    (docs/scaling.md)."""
    requests: int = Field(default=3000, ge=100, le=1_000_000, title="Simulation")
    """Requests of a simulated fleet."""
    seed: int = Field(default=0, ge=0, title="Simulation")
    """Seed of these."""
    output_format: Literal["text", "json"] = Field(default="text", title="Report")
    """Print text for people, or JSON for programs on standard output."""


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
