"""Requests to workers, their parameters, and the outputs that come back.

Unknown fields are ignored, so a field may be added with a default but never change its meaning. All
types are msgspec structs; embeddings inside them travel as raw buffers (`inlay.transport.frames`).
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ForwardRef, Literal, TypeAlias, Union

import msgspec

from inlay.base.address import Address, KvRoom
from inlay.base.errors import ErrorFrame, InlayError
from inlay.extension import parts, type_of
from inlay.messages.edges import Fetch, HeldReason, PayloadLease, Window
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.pooling import Pooling as Pooling
from inlay.messages.prompt import Buffer, Prompt, Tokens


class Task(StrEnum):
    """The kinds of result that an engine makes."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    ENCODE = "encode"
    STAGE = "stage"
    FETCH = "fetch"
    PAGES = "pages"


FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
"""Kinds of grammar, by vLLM's names; see `Grammar`."""

MAX_GRAMMAR = 256 * 1024
"""Characters of a grammar's source."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that the whole text of an output must match; the engine compiles it.

    Attributes:
        kind: how to read `source`. "json_schema": the schema as JSON. "json_object": any JSON
            object, `source` is empty. "regex": a regular expression that matches all of the output.
            "choice": a JSON list of strings, one of which the output is. "grammar": Lark or GBNF
            (which vLLM calls EBNF).
        source: the text of it.
        after: token ids; the output is free until it holds this run of ids for the first time, and
            the grammar binds what follows. Empty: it binds from the start.
        loose: names in the `$defs` of a schema that are held only as far as they can be compiled.
    """

    kind: GrammarKind
    source: str = ""
    after: tuple[int, ...] = ()
    loose: tuple[str, ...] = ()


class ThinkingBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens that a model may think for, as vLLM's `thinking_token_budget` counts them.

    What stands between `start` and `end` is thinking. Where it has as many tokens as `tokens`,
    `end` is chosen next, whatever else binds the output. Thinking that begins anew has a budget of
    its own.

    Attributes:
        tokens: at most, the tags not counted.
        start: ids of the tag before it; at least one.
        end: ids of the tag behind it; at least one.
        spent: tokens of a thinking that the prompt has begun and not ended; None where it has not.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    spent: int | None = None

    def spent_in(self, prompt: Prompt) -> int | None:
        """Positions behind the last start tag of `prompt`; None where no thinking is open there."""
        behind = 0
        for segment in reversed(prompt.segments):
            if isinstance(segment, Tokens):
                start, end = _last(segment.ids, self.start), _last(segment.ids, self.end)
                if start > end:
                    return behind + len(segment) - start - len(self.start)
                if end >= 0:
                    return None
            behind += len(segment)
        return None


class Sampling(msgspec.Struct, frozen=True, kw_only=True, tag="sampling", omit_defaults=True):
    """Sampling parameters. Defaults are OpenAI's; the frontend has checked every range.

    Attributes:
        max_tokens: output tokens at most, the resumed ones included; 0 where only the prompt is of
            interest.
        min_tokens: output tokens before an end token may be chosen.
        temperature: 0 is greedy.
        top_k: 0 means all.
        seed: the source of all randomness: a choice is a pure function of (seed, output index) and
            the distribution.
        unseeded: the client gave no seed, and `seed` was drawn for it: nobody can ask for the same
            output again.
        logit_bias: token id to the value added to its logit.
        stop_token_ids: end the output as the model's own end tokens do.
        ignore_eos: the model's own end tokens do not end the output.
        logprobs: number of alternatives a token, None for no logprobs; the chosen token is always
            given.
        grammar: what the output must match, or None; only of a kind in the card's `grammars`.
        bad_words: runs of token ids of which none may be completed in the output.
        allowed_token_ids: the only ids that may be chosen, or None for all. The end tokens are
            allowed only when named.
        prompt_logprobs: alternatives a prompt position, None for none; only where all of the prompt
            is tokens. A request with `prior_output` has been told of its prompt before and is not
            told again.
        logprob_token_ids: ids whose logprobs stand, in this order, in the place of the most likely
            ones'.
        thinking: when the model's reasoning is ended for it, or None.
        hidden_states: those that come with the output, or None.
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
    unseeded: bool = False
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
    hidden_states: HiddenStates | None = None


class PageQuery(msgspec.Struct, frozen=True, tag="pages"):
    """Parameters of a worker's request for pages of keys and values that another has cached.

    Attributes:
        layout: `ModelCard.kv_layout` of the worker that asks.
        group: number of the page group.
        digests: 16 bytes for each page, in order; what is given ends before one that is not cached.
        within: seconds for which the answer may wait until the first of them is computed.
        answer_bytes: of all of them.
        into: writable memory of the worker that asks, if the answer may be made there; never sent.
    """

    layout: str
    group: int
    digests: bytes
    within: float = 0.0
    answer_bytes: int = 0
    into: memoryview | None = None


PAGES = b"pages"
"""Name of the `Source` of workers that have pages of the prompt cached."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Workers that have, or make, what goes by a name.

    Attributes:
        name: digest of an item of media, for its rows; or `PAGES`.
        peers: addresses of workers, the first to ask first.
    """

    name: bytes
    peers: tuple[Address, ...]


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a request gives, or a part of one.

    Attributes:
        port: name of this result among those of the task, as in `PORTS`.
        dtype: of `data`, one of `inlay.messages.prompt.DTYPE_SIZES`.
        shape: of `data`.
        data: the elements, C order, little endian.
        last: nothing more follows on this port.
    """

    port: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    last: bool = True


class Input(msgspec.Struct, frozen=True, array_like=True):
    """A payload that a stage is given on one of its ports."""

    port: str
    value: Payload


if TYPE_CHECKING:
    Params: TypeAlias = Sampling | Pooling | Fetch | PageQuery | msgspec.Struct
    Feed: TypeAlias = Any
else:
    # Read when the first decoder is made: extensions have types of their own.
    Params = ForwardRef("_any_params()")
    Feed = ForwardRef("_feed()")

_PARAMS: Mapping[Task, type | None] = {
    Task.GENERATE: Sampling,
    Task.STAGE: None,  # those of extensions
    Task.FETCH: Fetch,
    Task.PAGES: PageQuery,
}


@cache
def _stage_params() -> tuple[type, ...]:
    return tuple(kind for _, kinds in parts("params") for kind in kinds)


def _feed() -> object:
    return type_of("feeds", Any)


def _any_params() -> object:
    return Union[(Sampling, Pooling, Fetch, PageQuery, *_stage_params())]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence to generate, texts or pairs of texts to embed or score, or images to encode.

    Raises `ValueError` if the task does not fit the parameters or the number of prompts.

    Attributes:
        id: unique among the requests in flight of a frontend.
        attempt: counts up when the request is sent again; answers of older attempts are dropped.
        task: the kind of result that is asked for.
        prompts: exactly one where text is generated; else at least one, with the special tokens
            around its text. Rows are in the model's activation dtype and carry their digests.
        params: `Sampling` where text is generated, what an extension has for a stage, else
            `Pooling`.
        prior_output: ids an earlier attempt has already shown; they stay output for penalties,
            limits and usage.
        adapter: name of the adapter, or None.
        salt: separates prefix caches; the tenant or the client's `cache_salt`.
        deadline: seconds the request may still take when it is sent, or None.
        priority: lower is sooner, as in vLLM.
        trace: W3C `traceparent` of the span it belongs to, where that is recorded.
        client: whose it is, as its frontend tells clients apart: who makes an engine wait takes
            turns with the others. None where unknown.
        sources: where the worker may ask for rows of media and pages; it may also make them.
        inputs: of a stage, by port.
        feeds: further ones, which the worker fetches.
        hold: if others can reach it, the worker keeps the payloads, of which it gives a lease; then
            an output that is `held` stands in place of the last, until the request is cancelled.
            The request waits while more is kept than this window.
        prefetch: nothing is computed; the worker fetches the prompt's pages as they are computed.
        gives_ticket: the worker keeps the prompt's keys and values for another; gives a ticket.
        ticket: of another worker that keeps them; empty for none.
        kv_room: of a request that a prefill worker and a decode worker have at the same time; each
            does its part. None for a whole request.
    """

    id: str
    prompts: tuple[Prompt, ...]
    params: Params
    task: Task = Task.GENERATE
    attempt: int = 0
    prior_output: tuple[int, ...] = ()
    adapter: str | None = None
    salt: str | None = None
    deadline: float | None = None
    priority: int = 0
    trace: str | None = None
    client: str | None = None
    sources: tuple[Source, ...] = ()
    inputs: tuple[Input, ...] = ()
    feeds: tuple[Feed, ...] = ()
    hold: Window | None = None
    prefetch: bool = False
    gives_ticket: bool = False
    ticket: bytes = b""
    kv_room: KvRoom | None = None

    def __post_init__(self) -> None:
        prompts = len(self.prompts)
        expected = _PARAMS.get(self.task, Pooling) or _stage_params()
        count = prompts == 1 if expected is Sampling else (prompts > 0) == (expected is Pooling)
        fits = count and isinstance(self.params, expected)
        if not fits or ((self.inputs or self.feeds) and self.task is not Task.STAGE):
            raise ValueError(
                f"a request to {self.task} has {prompts} prompts, {len(self.inputs)} inputs and "
                f"{type(self.params).__name__}; allowed: one prompt and Sampling to generate, "
                f"inputs and {' or '.join(kind.__name__ for kind in _stage_params()) or 'nothing'} "
                "for a stage, Fetch to fetch, PageQuery for pages, at least one prompt and Pooling "
                "for all other tasks"
            )

    @property
    def prompt(self) -> Prompt:
        """The prompt of a request that generates."""
        return self.prompts[0]

    @property
    def sampling(self) -> Sampling:
        """The parameters of a request that generates. Raises `TypeError` for any other."""
        if not isinstance(self.params, Sampling):
            raise TypeError(f"a request to {self.task} has no sampling parameters")
        return self.params

    @property
    def pooling(self) -> Pooling:
        """The parameters of a request that does not generate. Raises `TypeError` for any other."""
        if not isinstance(self.params, Pooling):
            raise TypeError(f"a request to {self.task} has no pooling parameters")
        return self.params

    @property
    def num_positions(self) -> int:
        """Positions of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def has_rows(self) -> bool:
        """True if any prompt has rows."""
        return any(prompt.has_rows for prompt in self.prompts)

    @property
    def has_embeds(self) -> bool:
        """True if any prompt has rows that came as such, not as media."""
        return any(prompt.has_embeds for prompt in self.prompts)

    def peers_of(self, name: bytes) -> tuple[Address, ...]:
        """Return the workers to ask for what is called `name`."""
        return next((source.peers for source in self.sources if source.name == name), ())

    def end(self, reason: FinishReason, error: InlayError | None = None) -> "Output":
        """Return the last output of a request that gives nothing beyond `prior_output`."""
        return Output(
            self.id,
            self.attempt,
            len(self.prior_output),
            finish_reason=reason,
            error=None if error is None else ErrorFrame.of(error),
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one output position.

    Of the chosen token and of the `top` most likely (id, logprob), best first; under
    `Sampling.logprob_token_ids` of those ids, as they were given.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at N consecutive prompt positions, each given all that stands before it.

    Little endian, C order.

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


class EngineUsage(msgspec.Struct, frozen=True, array_like=True):
    """Positions counted by the engine.

    `cached_tokens` of the prompt came from the prefix cache. `queued_seconds` is how long the
    request waited for its first step, where the engine says so.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queued_seconds: float = 0.0


PORTS: Mapping[Task, str] = {
    Task.EMBED: "embeddings",
    Task.SCORE: "logits",
    Task.ENCODE: "embeddings",
    Task.PAGES: "pages",
    Task.GENERATE: "ticket",
}
"""Port of the payload of each task.

"embeddings" are float32 [prompts, size], "logits" float32 [prompts, labels]; outputs that a request
names come on ports of their names (`inlay.embedding.bundles`). To encode, there is a
payload for each prompt, in their order: the rows of its image [rows, hidden size] in the model's
dtype. Further ports bring, in the same order, the fields of the rows' bundle: "grid", int32 [rows,
3], and "deepstack.0" and so on, of the shape and dtype of the rows. "pages" are uint8 [pages, bytes
of a record], a "ticket" is uint8 [bytes] (`Request.gives_ticket`).
"""


class Output(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A piece of a request's output.

    Attributes:
        request_id: of the request.
        attempt: of the request.
        offset: output index of the first id here, resumed ones counted.
        token_ids: the new ids. An end or stop token that ended the output is the last of them,
            counted in usage.
        logprobs: one for each id, when asked for.
        finish_reason: set on the last output; with "error", `error` says why.
        stop_token_id: the id that ended the output, when one did; it is also the last of
            `token_ids`.
        usage: set on the first and on the last output.
        error: why the request failed.
        prompt_logprobs: of the next prompt positions, when asked for; all of them have come with or
            before the first id.
        payloads: results that are no tokens.
        lease: of the payloads, which are kept; on the first output that has some.
        held: the finish reason of a request whose payloads are kept until it is cancelled
            (`Request.hold`).
    """

    request_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    usage: EngineUsage | None = None
    error: ErrorFrame | None = None
    prompt_logprobs: PromptLogprobs | None = None
    payloads: tuple[Payload, ...] = ()
    lease: PayloadLease | None = None
    held: HeldReason | None = None

    @property
    def only_tokens(self) -> bool:
        """True if it has ids with their logprobs, and nothing else."""
        some = self.usage or self.prompt_logprobs or self.payloads or self.lease or self.held
        return not (some or self.finish_reason or self.error)


Emit: TypeAlias = Callable[[Output], None]
"""Takes an output on the event loop the engine was started on; must not block."""


def _last(ids: Sequence[int], run: tuple[int, ...]) -> int:
    """Index at which `run` begins for the last time, or -1."""
    ids = tuple(ids)
    backwards, place = ids[::-1], 0
    while True:
        try:
            place = backwards.index(run[-1], place)
        except ValueError:
            return -1
        start = len(ids) - place - len(run)
        if start >= 0 and ids[start : start + len(run)] == run:
            return start
        place += 1
