"""Settings of the HTTP side: the flags, environment variables and config keys of a frontend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationInfo

from inlay.base.errors import InvalidRequestError
from inlay.media.addresses import networks
from inlay.media.fetch import FetchSettings

MIB = 1024 * 1024
AUTO: Literal["auto"] = "auto"
"""Value of a limit that is derived from the model."""


def _origin(value: str) -> str:
    parts = urlsplit(value)
    whole = parts.scheme in ("http", "https") and bool(parts.hostname)
    if value != "*" and not (
        whole and value == f"{parts.scheme}://{parts.netloc}" == value.lower()
    ):
        raise ValueError("an origin is * or scheme://host[:port] in lower case, without a path")
    return value


def _kept(value: int) -> int:
    if value < -1 or value == 0:
        raise ValueError("must be -1 or at least 1")
    return value


def _with_slash(value: str) -> str:
    return f"/{value.strip('/')}".removesuffix("/")


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError("must be a directory that is there")
    return path


def _with_certfile(value: Path | int | None, info: ValidationInfo) -> Path | int | None:
    # The certificate's own field stands before the ones that are nothing without it.
    if value and info.data.get("ssl_certfile") is None:
        raise ValueError("needs --ssl-certfile")
    return value


def _network(value: str) -> str:
    try:
        networks((value,))
    except InvalidRequestError as error:
        raise ValueError(error.message) from error
    return value


Network = Annotated[str, AfterValidator(_network)]
Origin = Annotated[str, AfterValidator(_origin)]


class FrontendSettings(BaseModel, frozen=True, defer_build=True):
    """Settings of a frontend. Names are vLLM's where vLLM has the same setting."""

    headings: ClassVar[Mapping[str, str]] = {
        "enable_prompt_embeds": "Embeddings as prompts",
        "allowed_media_domains": "Media by URL",
        "max_body_bytes": "Limits of clients",
        "chat_template": "Chat",
        "share_prefix_cache": "Administration",
        "allowed_origins": "Browsers and TLS",
    }
    """Headings of its options: a field to the one that begins with it."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 for a free port."""
    api_key: list[SecretStr] = []
    """API keys; without any, and without a key file, no key is required. Other users of the machine
    can read flags: prefer the variable or the file."""
    admin_api_key: list[SecretStr] = []
    """Keys that may also use the admin routes."""
    api_key_file: Path | None = None
    """YAML or JSON file of keys with names, rates and rights; reloaded when it changes and on
    SIGHUP."""
    enable_prompt_embeds: bool = False
    """Accept embeddings as prompts."""
    max_prompt_embeds_bytes: Annotated[int, Field(ge=100)] | Literal["auto"] = AUTO
    """Maximum bytes of one tensor file, decoded; at least 100. auto is the size of the model's
    whole context in float32, at least 10 MB, and no more than max_request_embeds_bytes,
    max_body_bytes and what one client may hold; /v1/models shows it."""
    max_prompt_embeds_parts: int = Field(default=128, ge=1)
    """Maximum embeddings in one request, references included."""
    max_request_embeds_bytes: int = Field(default=64 * MIB, ge=100)
    """Maximum bytes of all embeddings of one request, decoded."""
    allowed_media_domains: list[str] = []
    """Hosts that images may be fetched from, exactly; any public host unless set."""
    allowed_media_networks: list[Network] = []
    """Networks beside the public internet that images may be fetched from, such as 10.1.0.0/16."""
    allowed_local_media_path: Annotated[Path, AfterValidator(_directory)] | None = None
    """Directory below which file: URLs of images are read; none by default."""
    max_media_bytes: int = Field(default=32 * MIB, ge=1024)
    """Maximum bytes of one image file."""
    media_timeout: float = Field(default=10.0, gt=0)
    """Maximum seconds to fetch one image."""
    max_media_fetches: int = Field(default=128, ge=1)
    """Maximum images that are fetched at a time. One client may have as many open as remain free,
    so that there is always a place for the next."""
    max_body_bytes: int = Field(default=64 * MIB, ge=1024)
    """Maximum bytes of a request body."""
    max_json_bytes: int = Field(default=16 * MIB, ge=1024)
    """Maximum bytes of JSON in a request body, without tensor data in base64 strings of 64 KB or
    more. Parsing blocks other requests, 5 to 15 ms for each MiB."""
    max_inflight_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Maximum bytes of bodies and their decoded data, held at a time."""
    max_inflight_requests: int = Field(default=1024, ge=1)
    """Maximum running requests."""
    max_client_bytes: int | None = Field(default=None, ge=1)
    """Maximum bytes of one client (a key, or an IP address without keys) within max_inflight_bytes;
    half of it, or the largest request, unless set."""
    max_client_requests: int | None = Field(default=None, ge=1)
    """Maximum running requests of one client; by default half of all."""
    max_client_rate: float | None = Field(default=None, gt=0)
    """Maximum requests of one client in a minute; unlimited unless set. A key file may set it for
    each key."""
    body_timeout: float = Field(default=30.0, gt=0)
    """Maximum seconds without a byte of a body arriving."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Maximum seconds of a request in all; unlimited unless set. A client may set less with the
    header X-Request-Timeout."""
    asleep_requests: Literal["reject", "wait"] = "reject"
    """Requests for a model that is asleep: reject them with 503, or let them wait until it is
    awake."""
    drain_timeout: float = Field(default=5.0, ge=0)
    """Seconds for open requests to end after SIGTERM or Ctrl-C."""
    max_choices: int = Field(default=128, ge=1)
    """Maximum choices of one request, over all its prompts."""
    max_embedding_inputs: int = Field(default=2048, ge=1)
    """Maximum texts, or pairs of texts, to embed or score in one request."""
    truncate_prompt_tokens: Annotated[int, AfterValidator(_kept)] | None = None
    """Positions kept of inputs to embed, score or classify whose request does not say it; -1 keeps
    as many as the model takes. Longer inputs are refused unless set."""
    embedding_cache_bytes: int = Field(default=0, ge=0)
    """Bytes of the cache of embeddings for repeated texts; 0 disables it. Equal texts in running
    requests are always computed once."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Scheduling: first come, first served, or by the priority in requests. Every client may set
    one, so use it only for clients that trust each other."""
    chat_template: str | None = None
    """Chat template instead of the model's own: a file, or the template itself."""
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "mistral",
        "deepseek_v3",
        "deepseek_v31",
        "qwen3_coder",
        "openai",
    ] = AUTO
    """Format of the model's tool calls; auto detects it in the chat template."""
    enable_auto_tool_choice: bool = True
    """Let the model decide to call tools; needs a known format of tool calls."""
    reasoning_parser: Literal[
        "auto", "none", "deepseek_r1", "deepseek_v3", "qwen3", "mistral", "openai_gptoss"
    ] = AUTO
    """Format of the model's reasoning, which is separated from the answer; auto detects it in the
    chat template."""
    share_prefix_cache: bool = False
    """Share cached prefixes among API keys. By default each key has its own: a shared cache would
    reveal to one client what another has sent."""
    enable_per_request_metrics: bool = False
    """Show with each answer of one choice how long it waited and took, as vLLM does: `metrics` of
    completions and chats, in a stream beside the usage."""
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on which admin routes need no key; 0 for a free port. Off by default."""
    admin_host: str = "127.0.0.1"
    """Address the admin port listens on."""
    metrics_public: bool = True
    """Show /metrics and /load to everyone; otherwise they are admin routes."""
    enable_tokenizer_info_endpoint: bool = False
    """Show /tokenizer_info, which has the chat template, to clients; otherwise it is an admin
    route."""
    enable_embedding_lookup: bool = False
    """Make embeddings of texts, and show clients the tokens nearest to their own uploads, as the
    page at / does. Both show the model's embedding table."""
    enable_hidden_states: bool = False
    """Let every client read the hidden states of its own requests. A key file may allow or deny it
    for each key."""
    max_hidden_states_bytes: int = Field(default=64 * MIB, ge=1)
    """Maximum bytes of the hidden states in one answer."""
    log_requests: bool = True
    """Log one line for each request: counts and times, never its text or answer."""
    allowed_origins: list[Origin] = []
    """Web origins whose pages may call the API; * for all; none by default."""
    ssl_certfile: Path | None = None
    """Certificate chain, PEM; enables HTTPS. Reloaded when it changes and on SIGHUP."""
    ssl_keyfile: Annotated[Path | None, AfterValidator(_with_certfile)] = None
    """Private key of the certificate, PEM; by default in the certificate's file."""
    ssl_ca_certs: Annotated[Path | None, AfterValidator(_with_certfile)] = None
    """Certificates of the authorities that sign clients' certificates, PEM."""
    ssl_cert_reqs: Annotated[int, AfterValidator(_with_certfile)] = Field(default=0, ge=0, le=2)
    """Clients' certificates: 0 not requested, 1 optional, 2 required."""
    root_path: Annotated[str, AfterValidator(_with_slash)] = ""
    """Path prefix that a proxy in front removes, as /llm. Requests whose prefix it keeps are served
    too."""

    @property
    def fetching(self) -> FetchSettings:
        """Limits of fetching media."""
        return FetchSettings(
            domains=tuple(self.allowed_media_domains),
            private_networks=tuple(self.allowed_media_networks),
            local=self.allowed_local_media_path,
            max_bytes=self.max_media_bytes,
            seconds=self.media_timeout,
            places=self.max_media_fetches,
        )
