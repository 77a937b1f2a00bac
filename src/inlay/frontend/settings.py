"""Settings of the HTTP side: the flags, environment variables and config keys of a frontend."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationInfo

MIB = 1024 * 1024
AUTO: Literal["auto"] = "auto"
"""Of a limit: what the model makes of it."""


def _origin(value: str) -> str:
    parts = urlsplit(value)
    whole = parts.scheme in ("http", "https") and bool(parts.hostname)
    if value != "*" and not (
        whole and value == f"{parts.scheme}://{parts.netloc}" == value.lower()
    ):
        raise ValueError("an origin is * or scheme://host[:port] in lower case, without a path")
    return value


def _with_certfile(value: Path | int | None, info: ValidationInfo) -> Path | int | None:
    # The certificate's own field stands before the ones that are nothing without it.
    if value and info.data.get("ssl_certfile") is None:
        raise ValueError("needs --ssl-certfile")
    return value


Origin = Annotated[str, AfterValidator(_origin)]


class FrontendSettings(BaseModel):
    """Who may ask, for what, and how much at a time. Names are vLLM's where vLLM has one."""

    model_config = ConfigDict(frozen=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    api_key: list[SecretStr] = Field(
        default=[],
        description="Keys clients may use; none, and no key file, means no key is asked for. Other users of the machine "
        "can read a flag: the variable or the file keeps it from them.",
    )
    admin_api_key: list[SecretStr] = Field(
        default=[], description="Keys that may also use the admin routes."
    )
    api_key_file: Path | None = Field(
        default=None,
        description="YAML or JSON file of keys with names, rates and rights, read again when it changes and on SIGHUP.",
    )
    enable_prompt_embeds: bool = Field(default=False, description="Accept embeddings as prompts.")
    max_prompt_embeds_bytes: Annotated[int, Field(ge=100)] | Literal["auto"] = Field(
        default=10 * MIB,
        description="Decoded container bytes of one embeddings prompt at most, at least 100; auto is what the model's "
        "context can hold in its dtype.",
    )
    max_prompt_embeds_parts: int = Field(
        default=128, ge=1, description="Embeddings, sent or named, in one request at most."
    )
    max_request_embeds_bytes: int = Field(
        default=64 * MIB,
        ge=100,
        description="Decoded bytes of all embeddings of one request at most.",
    )
    max_body_bytes: int = Field(
        default=64 * MIB, ge=1024, description="Bytes of a request body at most."
    )
    max_json_bytes: int = Field(
        default=16 * MIB,
        ge=1024,
        description="Bytes of JSON in a request body at most, base64 strings of 64 KB and more not counted. They are parsed in one "
        "piece, while everybody waits: about 5 ms a MiB, 15 at worst.",
    )
    max_inflight_bytes: int = Field(
        default=256 * MIB,
        ge=MIB,
        description="Bytes of bodies, and of what they decode to, held at a time.",
    )
    max_inflight_requests: int = Field(
        default=1024, ge=1, description="Requests under way at a time."
    )
    max_client_bytes: int | None = Field(
        default=None,
        ge=1,
        description="What one client may hold of max_inflight_bytes; half, or one largest request where that is more, "
        "unless set. A client is a key or, where no key is asked for, an address.",
    )
    max_client_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests one client may have under way; half of all unless set.",
    )
    max_client_rate: float | None = Field(
        default=None,
        gt=0,
        description="Requests one client may make in a minute; no bound unless set. A key file may say otherwise.",
    )
    body_timeout: float = Field(
        default=30.0, gt=0, description="Seconds a body may go without a byte arriving."
    )
    request_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds a request may take in all; no bound unless set. A client may ask for less with the header "
        "X-Request-Timeout.",
    )
    asleep_requests: Literal["reject", "wait"] = Field(
        default="reject",
        description="What becomes of requests for a model that is asleep: 503 at once, or they wait until it is awake.",
    )
    drain_timeout: float = Field(
        default=5.0, ge=0, description="Seconds open requests get to end after SIGTERM or Ctrl-C."
    )
    max_choices: int = Field(
        default=128, ge=1, description="Choices one request may ask for, over all its prompts."
    )
    max_embedding_inputs: int = Field(
        default=2048,
        ge=1,
        description="Texts, or pairs of texts, one request may have embedded or scored.",
    )
    embedding_cache_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of embeddings kept for texts that come again; 0 keeps none. Equal texts that are under way at a time are "
        "computed once in any case.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="Whose turn it is: first come, first served, or by the priority that requests give. Every client may give one, "
        "so only for clients that trust each other.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template instead of the model's own: a file, or the template itself.",
    )
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
    ] = Field(
        default=AUTO,
        description="Form in which the model writes tool calls; auto is what its chat template shows.",
    )
    enable_auto_tool_choice: bool = Field(
        default=True,
        description="Let the model decide whether it calls a tool; needs no more than a known form of calls.",
    )
    reasoning_parser: Literal[
        "auto", "none", "deepseek_r1", "deepseek_v3", "qwen3", "mistral", "openai_gptoss"
    ] = Field(
        default=AUTO,
        description="Form in which the model writes its reasoning, which is told apart from the answer; auto is what its chat "
        "template shows.",
    )
    share_prefix_cache: bool = Field(
        default=False,
        description="Let the holders of different API keys share cached prefixes. Apart unless set: what is cached "
        "would tell one what another asked.",
    )
    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port on which admin routes need no key; 0 takes a free one. None unless set.",
    )
    admin_host: str = Field(default="127.0.0.1", description="Address the admin port listens on.")
    metrics_public: bool = Field(
        default=True,
        description="Show /metrics and /load to everyone; otherwise they are admin routes.",
    )
    enable_tokenizer_info_endpoint: bool = Field(
        default=False,
        description="Show /tokenizer_info, which has the chat template, to clients; otherwise it is an admin route.",
    )
    log_requests: bool = Field(
        default=True,
        description="Log one line a request: counts and times, never what was asked or answered.",
    )
    allowed_origins: list[Origin] = Field(
        default=[],
        description="Web origins whose pages may call the API; * for all, none unless set.",
    )
    ssl_certfile: Path | None = Field(
        default=None,
        description="Certificate chain, PEM; HTTPS is served when it is set. Read again on SIGHUP.",
    )
    ssl_keyfile: Annotated[Path | None, AfterValidator(_with_certfile)] = Field(
        default=None,
        description="Private key of the certificate, PEM; in the certificate's file unless set.",
    )
    ssl_ca_certs: Annotated[Path | None, AfterValidator(_with_certfile)] = Field(
        default=None,
        description="Certificates of the authorities that sign clients' certificates, PEM.",
    )
    ssl_cert_reqs: Annotated[int, AfterValidator(_with_certfile)] = Field(
        default=0,
        ge=0,
        le=2,
        description="Clients' certificates: 0 not asked for, 1 optional, 2 required.",
    )
    root_path: str = Field(default="", description="Path prefix a proxy in front strips.")
