"""What workers are told, what they answer, and the protocols of engine and plane.

Version `PROTOCOL` talks to `PROTOCOL - 1`; unknown fields are ignored, so a field may be added with a default but never
change its meaning. All types are msgspec structs; embeddings inside them travel as raw buffers (`inlay.protocol.frames`).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from inlay.errors import EngineError, ErrorFrame
from inlay.prompt import Prompt
from inlay.protocol.capabilities import Exactness as Exactness
from inlay.protocol.capabilities import Refusal
from inlay.protocol.embedding import EmbeddingCard, EmbedOutput, EmbedRequest, EmitEmbedOutput
from inlay.protocol.grammar import MAX_GRAMMAR as MAX_GRAMMAR
from inlay.protocol.grammar import Grammar as Grammar
from inlay.protocol.grammar import GrammarKind as GrammarKind
from inlay.protocol.health import Probe
from inlay.protocol.health import Stats as Stats
from inlay.protocol.thinking import ThinkingBudget as ThinkingBudget

PROTOCOL = 1
"""The version of these messages."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class Task(StrEnum):
    """What an engine can be asked for."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Defaults are OpenAI's; the frontend has checked every range.

    Attributes:
        max_tokens: output tokens at most, the resumed ones included; 0 where only the prompt is of interest.
        min_tokens: output tokens before an end token may be chosen.
        temperature: 0 is greedy.
        top_k: 0 means all.
        seed: the source of all randomness: a choice is a pure function of (seed, output index) and the distribution.
        logit_bias: token id to the value added to its logit.
        stop_token_ids: end the output as the model's own end tokens do.
        ignore_eos: the model's own end tokens do not end the output.
        logprobs: number of alternatives a token, None for no logprobs; the chosen token is always given.
        grammar: what the output must match, or None; only of a kind in the card's `grammars`.
        bad_words: runs of token ids of which none may be completed in the output.
        allowed_token_ids: the only ids that may be chosen, or None for all. The end tokens are allowed only when named.
        prompt_logprobs: alternatives a prompt position, None for none; only where all of the prompt is tokens. A request with
            `prior_output` has been told of its prompt before and is not told again.
        logprob_token_ids: ids whose logprobs stand, in this order, in the place of the most likely ones'.
        thinking: when the model's reasoning is ended for it, or None.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to be generated.

    Attributes:
        id: unique among the requests in flight of a frontend.
        attempt: counts up when the request is sent again; answers of older attempts are dropped.
        prompt: rows are in the model's activation dtype and carry their digests.
        prior_output: ids an earlier attempt has already shown; they stay output for penalties, limits and usage.
        adapter: name of the adapter, or None.
        salt: separates prefix caches; the tenant or the client's `cache_salt`.
        deadline: seconds the request may still take when it is sent, or None.
        priority: lower is sooner, as in vLLM.
        trace: W3C `traceparent` of the span it belongs to, where that is recorded.
        client: whose it is, as its frontend tells clients apart: who makes an engine wait takes turns with the others. None where unknown.
    """

    id: str
    prompt: Prompt
    sampling: Sampling
    attempt: int = 0
    prior_output: tuple[int, ...] = ()
    adapter: str | None = None
    salt: str | None = None
    deadline: float | None = None
    priority: int = 0
    trace: str | None = None
    client: str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one output position: of the chosen token and of the `top` most likely (id, logprob), best first.

    Under `Sampling.logprob_token_ids` of those ids, as they were given.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at N consecutive prompt positions, each given all that stands before it; little endian, C order.

    Attributes:
        start: the first of the positions, at least 1: nothing stands before position 0.
        ids: int32 [N, 1 + K]: the prompt's own token, then the K most likely, best first.
        logprobs: float32 [N, 1 + K], of these.
        ranks: int32 [N], of the prompt's own token: 1 is the most likely.
    """

    start: int
    ids: bytes
    logprobs: bytes
    ranks: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Positions counted by the engine; `cached_tokens` is what of the prompt came from the prefix cache.

    `queued_seconds` is how long the request waited for its first step, where the engine says so.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queued_seconds: float = 0.0


class Output(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A piece of a request's output.

    Attributes:
        request_id: of the request.
        attempt: of the request.
        offset: output index of the first id here, resumed ones counted.
        token_ids: the new ids. An end or stop token that ended the output is the last of them, counted in usage.
        logprobs: one for each id, when asked for.
        finish_reason: set on the last output; with "error", `error` says why.
        stop_token_id: the id that ended the output, when one did; it is also the last of `token_ids`.
        usage: set on the first and on the last output.
        error: why the request failed.
        prompt_logprobs: of the next prompt positions, when asked for; all of them have come with or before the first id.
    """

    request_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    error: ErrorFrame | None = None
    prompt_logprobs: PromptLogprobs | None = None


Emit: TypeAlias = Callable[[Output], None]
"""Takes an output on the event loop the engine was started on; must not block."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask of a worker."""

    max_model_len: int
    max_num_seqs: int
    max_logprobs: int = 20
    max_prompt_embeds_abs: float | None = None
    """Largest absolute value a row's element may have, or None where the engine bounds nothing."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter that is loaded and takes requests; it is a model of its own to clients.

    Attributes:
        name: what clients call it.
        content_id: digest of its configuration and weights, 32 hex digits; block digests hold it, never the name.
        path: the directory or address it was loaded from.
        kind: "lora", or "prompt": trained rows that stand before every prompt.
        rank: of a "lora".
        num_positions: of a "prompt"; they count as the prompt's.
    """

    name: str
    content_id: str
    path: str
    kind: Literal["lora", "prompt"] = "lora"
    rank: int = 0
    num_positions: int = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself when it is ready and whenever it changes, and what `/v1/models` shows of it.

    Workers with equal `name`, `weights_id` and `dtype` are a pool; routing and resuming never leave a pool.

    Attributes:
        name: the served name.
        aliases: further served names.
        path: where the model was loaded from; the frontend reads tokenizer and chat template there.
        weights_id: identity of configuration and weights, 32 hex digits.
        embedding_table_id: identity of the input embedding table, 32 hex digits, as `inlay.client` stamps it.
        embedding_abs_max: largest absolute value in the embedding table, after the model's own scale.
        dtype: activation dtype, one of `inlay.prompt.DTYPE_SIZES`.
        prompt_embeds: why rows are refused by this model or engine, or None where they are accepted.
        eos_token_ids: the model's own end tokens.
        default_sampling: fields of `Sampling` the model's generation config sets.
        resuming: exactness by feature: "greedy", "sampling", "penalties", "logprobs", "grammar".
        grammars: the kinds of grammar the engine can hold an output to; none when it cannot.
        shares_text_prefix: whether text-only and mixed prompts share cached prefixes.
        seeds: whether the seed of a request decides what is drawn.
        refusals: what it cannot do safely, or at all.
        kv_events: whether the worker tells which blocks it has cached, as `inlay.protocol.routing` says.
        adapters: those that are loaded; it changes while a worker runs.
        asleep: the level of its sleep, 0 while it is awake; only an awake worker is sent requests.
        probe: the last one of its engine; None before the first, while it sleeps, and where it is not probed.
        secret_fingerprint: of the namespace's root secret.
        embedding: of a model that makes vectors or scores.
    """

    name: str
    path: str
    weights_id: str
    dtype: str
    vocab_size: int
    hidden_size: int
    limits: Limits
    engine: str
    engine_version: str
    tasks: tuple[Task, ...] = (Task.GENERATE,)
    aliases: tuple[str, ...] = ()
    embedding_table_id: str = ""
    embedding_abs_max: float = 0.0
    prompt_embeds: str | None = None
    block_size: int = 16
    num_blocks: int = 0
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, float | int] = {}
    resuming: dict[str, Exactness] = {}
    grammars: tuple[GrammarKind, ...] = ()
    shares_text_prefix: bool = True
    seeds: bool = True
    kv_events: bool = False
    refusals: tuple[Refusal, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    asleep: int = 0
    probe: Probe | None = None
    secret_fingerprint: str = ""
    embedding: EmbeddingCard | None = None
    protocol: int = PROTOCOL


class Engine(Protocol):
    """What every engine is, whatever it can do; `GenerateEngine` and the others say that.

    Every method is called on the event loop of the worker, none of them may block it.
    """

    @property
    def card(self) -> ModelCard:
        """What it serves; known once it is started."""
        ...

    async def start(self) -> None:
        """Load the model and be ready. Raises `EngineError` or `InvalidRequestError` (a model it refuses)."""
        ...

    async def close(self) -> None:
        """Abort everything and free all memory."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request and free its memory within one step. Unknown ids are ignored. Emits a last output, "abort"."""
        ...

    async def probe(self) -> float:
        """Run one real token through the model; the seconds it took. Raises `EngineError` when it cannot."""
        ...

    def stats(self) -> Stats:
        """The counters now."""
        ...


@runtime_checkable
class GenerateEngine(Engine, Protocol):
    """An engine of `Task.GENERATE`."""

    def generate(self, request: Request, emit: Emit) -> None:
        """Admit `request`. Its outputs go to `emit` in order of offset, the last with a finish reason.

        Raises:
            InvalidRequestError: it can never run here; nothing was admitted.
        """
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget every cached block no running request uses; the number forgotten."""
        ...


@runtime_checkable
class FailingEngine(Protocol):
    """An engine that knows when it has failed for good: every request has ended with an error, and its worker is to end too."""

    async def failed(self) -> EngineError:
        """Return why, once it has."""
        ...


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine whose adapters come and go. Who may load what, and when one may go, its worker decides."""

    async def load_adapter(self, adapter: Adapter, directory: str) -> None:
        """Make `adapter`, whose checked files are in `directory`, usable by requests that name it; all or nothing. `max_cpu_loras` and one more have room.

        Raises `InvalidRequestError` where it does not fit the model, or there is no room for one more.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter no request uses any more."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can give its memory back while nobody needs it. No request is under way when it is told to."""

    def check_sleep(self, level: int) -> None:
        """Raise `InvalidRequestError` for a level it cannot sleep at, before any request is ended for it."""
        ...

    async def sleep(self, level: int) -> None:
        """Give back the memory of the cache and, level 1: keep the weights aside; level 2: forget them."""
        ...

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back what `tags` name, "weights" and "kv_cache"; none means all. Whether it is wholly awake."""
        ...


class Command(msgspec.Struct, frozen=True, array_like=True):
    """An admin call to a worker; `inlay.worker.host` has their names."""

    name: str
    arguments: dict[str, str | int | float | bool | None] = {}


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer to a command."""

    value: dict[str, str | int | float | bool | None] = {}
    error: ErrorFrame | None = None


class Stream(Protocol):
    """One request under way, as the frontend sees it."""

    def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        """Outputs as they come, all that have arrived at a time; ends after the one with a finish reason.

        Raises:
            OverloadedError: the worker is gone; the request may be sent again elsewhere.
            InvalidRequestError: the worker refused the request.
        """
        ...

    def cancel(self) -> None:
        """Stop the request; needs no answer. Safe to call again and after the end."""
        ...


class Worker(Protocol):
    """A worker a plane knows, ready for work."""

    @property
    def id(self) -> str:
        """Unique in the plane, never used again."""
        ...

    @property
    def card(self) -> ModelCard:
        """What it announced."""
        ...

    def send(self, request: Request) -> Stream:
        """Send a request. Rows go as raw buffers; requests whose prompts share memory share it on the way where the plane can."""
        ...

    async def embed(self, request: EmbedRequest) -> EmbedOutput:
        """Send a request and wait for its answer; whoever stops waiting cancels it. Raises as `Stream` does, and what the answer says."""
        ...

    async def call(self, command: Command, within: float = 30.0) -> Reply:
        """Run an admin command. Raises `OverloadedError` when the worker is gone, `DeadlineExceededError` after `within` s."""
        ...


class Plane(Protocol):
    """Carries works to workers and outputs back. The frontend's side."""

    async def start(self) -> None:
        """Connect, and begin to learn of workers."""
        ...

    async def close(self) -> None:
        """Cancel what is under way and disconnect."""
        ...

    def workers(self) -> Sequence[Worker]:
        """The workers that are ready now."""
        ...

    def unavailable(self) -> Mapping[str, str]:
        """The workers that should be there and are not ready, by whatever name, and why."""
        ...

    async def changed(self) -> None:
        """Return at the next change of the set of ready workers or of a card. Any number may wait.

        Nothing is missed by `while not condition(): await plane.changed()`.
        """
        ...

    def room(self, num_bytes: int) -> memoryview | None:
        """Writable memory of which a buffer in a request is not copied on its way, or None where there is none.

        It is free again once neither a view of it nor a request that was sent with one is left.
        """
        ...


class RequestHandler(Protocol):
    """What a plane's worker side drives: `inlay.worker` implements it around an engine."""

    def watch(self, announce: Callable[[ModelCard], None]) -> None:
        """Call `announce` with the card, now and whenever it has changed."""
        ...

    def generate(self, request: Request, emit: Emit) -> None:
        """As `GenerateEngine.generate`."""
        ...

    def embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        """As `EmbeddingEngine.embed`, but what is refused is an answer too."""
        ...

    def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        ...

    async def call(self, command: Command) -> Reply:
        """Run a command; failures are a `Reply` with an error."""
        ...
