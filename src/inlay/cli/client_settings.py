"""Settings classes of commands that ask a server, of `completion`, `embeds convert` and `audit`."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ChatSettings(BaseModel):
    """`inlay chat`."""

    model_config = ConfigDict(frozen=True, defer_build=True)

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


class WorkloadSettings(BaseModel):
    """Requests of a measurement."""

    model_config = ConfigDict(frozen=True, defer_build=True)

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


class BenchSettings(BaseModel):
    """`inlay bench`."""

    model_config = ConfigDict(frozen=True, defer_build=True)

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


class BenchWriteSettings(BaseModel):
    """`inlay bench write`."""

    model_config = ConfigDict(frozen=True, defer_build=True)

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


class CompletionSettings(BaseModel):
    """`inlay completion`."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    shell: Literal["bash", "zsh", "fish"]
    """bash, zsh or fish."""


class ConvertSettings(BaseModel):
    """`inlay embeds convert`."""

    model_config = ConfigDict(frozen=True, defer_build=True)

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


class AuditSettings(BaseModel):
    """`inlay embeds audit`."""

    model_config = ConfigDict(frozen=True, defer_build=True)

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
    """What is sent in place of the table's rows, each audited: none, noise:LEVEL (in units of the
    median norm), shuffle, permute, rotate, permute:folded, rotate:folded, project:WIDTH,
    drop:SHARE, hidden:LAYER, learned, or MODULE:FUNCTION of Python. none, noise:1, noise:4, rotate
    and shuffle unless set."""
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
