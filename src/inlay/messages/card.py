"""Model cards: the metadata a worker announces of its model, its limits and its health."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal, TypeAlias

import msgspec

from inlay.base.address import Address as Address
from inlay.extension import type_of
from inlay.media.spec import MediaSpec
from inlay.messages.fields import example
from inlay.messages.membership import Membership, UnreadMembership
from inlay.messages.pooling import EmbeddingCard as EmbeddingCard
from inlay.messages.request import GrammarKind, Task

PROTOCOL = 2
"""The version of these messages."""

if TYPE_CHECKING:
    Stage: TypeAlias = Membership
    ImageFacts: TypeAlias = msgspec.Struct
    AudioFacts: TypeAlias = msgspec.Struct
else:
    # Read when the first decoder is made: extensions have the types.
    Stage = ForwardRef("_type_of('stage')", module=__name__)
    ImageFacts = ForwardRef("_type_of('image')", module=__name__)
    AudioFacts = ForwardRef("_type_of('audio')", module=__name__)


def _type_of(field: str) -> object:
    return type_of(field, UnreadMembership if field == "stage" else Any)


class Exactness(StrEnum):
    """Equality of a resumed stream, with a feature in use, to one that was not cut.

    What was shown before is never changed. ROUNDED is what 16 bits give: numbers depend on what is
    computed together, so that where two tokens are nearly equally likely the other may come, and
    what follows is another continuation.
    """

    EXACT = "exact"
    ROUNDED = "rounded"
    SAMPLED = "sampled"
    IMPOSSIBLE = "impossible"

    @classmethod
    def of_dtype(cls, dtype: str) -> "Exactness":
        """EXACT or ROUNDED, by a model's activation dtype."""
        return cls.EXACT if dtype == "float32" else cls.ROUNDED


Feature: TypeAlias = str
"""Something that a request may ask for beyond a plain continuation of its prompt.

The name of a plain sampling field (`inlay.messages.fields`), or one that `inlay.messages.refusals`
knows.
"""


Phase: TypeAlias = Literal["prefill", "decode", "both"]
"""Parts of a request that a worker may be meant for: computing prompts, making tokens."""

Prompts: TypeAlias = Literal["any", "rows", "mixed"]
"""With which prompts: any, those with rows, or those with rows and tokens."""


class Refusal(msgspec.Struct, frozen=True):
    """One thing an engine refuses.

    Attributes:
        feature: what may not be asked for.
        prompts: together with which prompts.
        reason: what would happen; a sentence without its full stop.
    """

    feature: Annotated[Feature, example("thinking_token_budget")]
    prompts: Prompts
    reason: Annotated[str, example("its engine cannot compute them")]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one request, and of those that a worker has at a time."""

    max_model_len: int
    max_num_seqs: int
    max_logprobs: int = 20
    max_prompt_embeds_abs: float | None = None
    """Largest absolute value a row's element may have, or None where the engine bounds nothing."""
    max_num_queued_tokens: int | None = None
    """Positions that may be queued; more are refused. None where the engine bounds nothing."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter that is loaded and takes requests; it is a model of its own to clients.

    Attributes:
        name: what clients call it.
        content_id: digest of its configuration and weights, 32 hex digits; block digests hold it,
            never the name.
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


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stats"):
    """An engine's counters; totals only grow."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rows_served: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    num_drafts: int = 0
    """Chunks with drafts; then drafted tokens, and those of them that became output."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_draft_tokens: int = 0
    """Of those, what was drafted because a grammar allowed nothing else."""
    num_forced_accepted_tokens: int = 0
    progress: int = 0
    """Positions computed since the start.

    Grows while the engine lives, even through a long prefill.
    """
    kept_bytes: int = 0
    """Of stored prompts' rows that the worker keeps now; it changes both ways."""
    kept_hits: int = 0
    """Uses of those that it had; then those that were sent to it, and what went to make room."""
    kept_misses: int = 0
    kept_evictions: int = 0
    busy_seconds: float = 0.0
    """Seconds in which the model had a batch; of engines that make vectors."""
    image_cache_bytes: int = 0
    """Of the rows of encoded images that the engine keeps now; it changes both ways."""
    image_cache_hits: int = 0
    """Uses of images that were encoded already; then those encoded, and what went to make room."""
    image_cache_misses: int = 0
    image_cache_evictions: int = 0
    kv_pages_fetched: int = 0
    """Pages of keys and values that came from other workers; then those given to them."""
    kv_pages_given: int = 0
    kv_pages_offloaded: int = 0
    """Pages kept when the cache evicted them; then those that came back, and those kept that were
    dropped because they were damaged."""
    kv_pages_loaded: int = 0
    kv_pages_from_disk: int = 0
    """Of those that came back, the ones that came from files."""
    kv_pages_refused: int = 0
    kv_host_bytes: int = 0
    """Of pages kept in host memory now, and in files; they change both ways."""
    kv_disk_bytes: int = 0
    kv_disk_refused_files: int = 0
    """Files of pages that were dropped: torn, changed or another's; then reads and writes of files
    that failed."""
    kv_disk_errors: int = 0
    leases: int = 0
    """Requests whose payloads are kept for other workers now, the payloads, and their bytes; they
    change both ways."""
    held_payloads: int = 0
    held_bytes: int = 0
    fetched_payloads: int = 0
    """Payloads that came from other workers for requests here."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a health probe of an engine.

    Attributes:
        at: Unix time, on the worker's clock, when the engine had answered or was given up.
        seconds: it took until then.
        error: why it failed, or None.
        next_within: seconds after `at` in which another is known, or the worker itself is stuck.
    """

    at: float
    seconds: float
    error: str | None = None
    next_within: float


class SelfCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of comparing a loaded model with its own code (`--self-check`).

    Attributes:
        result: "passed"; "reduced", some modules were left as they were; "plain", all were;
            "noise", the model's own numbers are rounding; "partial", its own code does not run;
            "differs", from the reference of its pool; "unchecked", there is none.
        reference: library, version, attention and dtype that it was compared with.
        distance: largest error over the reference's own rounding; 1 is as near as rounding.
        bound: over which it is not served as it is.
        distances: by prompt and step.
        layers: distance of each decoder layer, given the reference's input; empty if they were not
            compared.
        noise: typical rounding of the reference, relative to its logits.
        num_modules: replaced modules that were compared.
        left_out: paths of those that were left as they were.
        seconds: that it took.
        shadow: relative distance of the logits of a small float32 model of the same structure; 0 if
            it was not compared.
        reason: what is wrong, of one that differs: a fleet sends it no requests.
        parts: relative distance to float32 of what is its library's own code: towers, denoisers.
        note: why one is unchecked. Not in `reason`: a frontend of before this field sends no
            requests to a worker that has one.
    """

    result: Annotated[str, example("passed")]
    reference: Annotated[str, example("transformers 5.23.0 sdpa bfloat16")]
    distance: Annotated[float, example(0.83)] = 0.0
    bound: Annotated[float, example(2.0)] = 0.0
    distances: Annotated[
        dict[str, float], example({"random, chunks": 0.61, "text, decoding": 0.83})
    ] = {}
    layers: Annotated[tuple[float, ...], example([0.4, 0.5])] = ()
    noise: Annotated[float, example(0.026)] = 0.0
    num_modules: Annotated[int, example(198)] = 0
    left_out: Annotated[tuple[str, ...], example([])] = ()
    seconds: Annotated[float, example(0.02)] = 0.0
    shadow: Annotated[float, example(2e-06)] = 0.0
    reason: Annotated[str, example("")] = ""
    parts: Annotated[dict[str, float], example({"vision": 0.003})] = {}
    note: Annotated[str, example("")] = ""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's part in a change of a model: see `inlay.router.shares`.

    Attributes:
        since: Unix time from which on some ready worker has had these weights under this name.
        min_workers: ready workers with these weights that replace older ones; None: more than the
            older ones have.
        weight: explicit share, against 1 of weights that have none; 0 takes no requests.
    """

    since: float = 0.0
    min_workers: int | None = None
    weight: float | None = None


class CanaryResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of asking again for what a worker answered first (`--self-check-interval`).

    Attributes:
        at: Unix time, on the worker's clock.
        distance: relative, of the logprobs from the first ones; infinite where one is no number.
        bound: distance that rounding explains; 0: they must be equal bit for bit.
        failures: wrong answers since the start.
        in_a_row: wrong answers since the last right one.
        adapter: whose distance it is; "" for the model's own.
    """

    at: float
    distance: float
    bound: float
    failures: int = 0
    in_a_row: int = 0
    adapter: str = ""

    @property
    def wrong(self) -> bool:
        """True after two wrong answers in a row: the worker is not well."""
        return self.in_a_row >= 2

    @property
    def reason(self) -> str:
        """Description of a wrong answer."""
        asked = f" of the adapter {self.adapter}" if self.adapter else ""
        return (
            f"the answer to the worker's own request{asked} differs from its first one by "
            f"{self.distance:.3g} (allowed: {self.bound:.3g}), {self.in_a_row} times in a row"
        )


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a worker's model, announced when it is ready and when it changes.

    `/v1/models` shows it.

    Workers with equal `name`, `weights_id`, `dtype`, `role` and `outputs` are a pool; routing and
    resuming never leave a pool. Where the role is to encode, `media.encoder_id` is equal too.

    Attributes:
        name: the served name.
        aliases: further served names.
        path: where the model was loaded from; the frontend reads tokenizer and chat template there.
        weights_id: identity of configuration and weights, 32 hex digits.
        weights_form: how its files hold the weights; "" for plain tensors.
        embedding_table_id: identity of the input embedding table, 32 hex digits, as `inlay.client`
            stamps it.
        embedding_abs_max: largest absolute value in the embedding table, after the model's own
            scale.
        dtype: activation dtype, one of `inlay.messages.prompt.DTYPE_SIZES`.
        prompt_embeds: why rows are refused by this model or engine, or None where they are
            accepted.
        eos_token_ids: the model's own end tokens.
        default_sampling: fields of `Sampling` the model's generation config sets.
        resuming: exactness by feature: "greedy", "sampling", "penalties", "logprobs", "grammar",
            "hidden_states".
        grammars: the kinds of grammar the engine can hold an output to; none when it cannot.
        shares_text_prefix: whether text-only and mixed prompts share cached prefixes.
        seeds: whether the seed of a request decides what is drawn.
        refusals: what it cannot do safely, or at all.
        kv_layout: form of the pages of keys and values that it gives to workers of the same, and
            takes from them; empty if it gives none.
        kv_tickets: it gives the keys and values of a prompt to one other worker, by the ticket that
            it makes when it has computed them; never by digest.
        kv_rooms: form of the keys and values that it gives or takes in a `KvRoom`; it does its
            `phase` alone then, and a request is sent to a prefill worker and a decode worker of
            one form at the same time. Empty if it takes whole requests.
        bootstrap: of a prefill worker with `kv_rooms`: host and port where decode workers find it.
        phase: of requests that the worker is meant for. It takes the others too, but for
            `kv_rooms`: routers weigh it.
        kv_events: whether the worker tells which blocks it has cached, as `inlay.messages.routing`
        says.
        adapters: those that are loaded; it changes while a worker runs.
        address: where frontends of other machines connect to it.
        dials: it connects to the frontends that ask it to, as none can connect to it.
        asleep: the level of its sleep, 0 while it is awake; only an awake worker is sent requests.
        probe: the last one of its engine; None before the first, while it sleeps, and where it is
            not probed.
        secret_fingerprint: of the namespace's root secret.
        self_check: result of its check at start; None without one.
        rollout: its part in a change of the model.
        canary: result of the last one; None before, and while the worker sleeps.
        embedding: of a model that makes vectors or scores.
        media: of a model that takes images, audio or video.
        stage: of a worker that makes a part of a model with others.
        image: what an extension says of a model that makes images.
        audio: what an extension says of a model that speaks.
        hidden_layers: the last layer whose hidden states it gives, as `HiddenStates` numbers them;
            None if it gives none.
        projected_size: elements of those behind its projector; None without one.
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
    weights_form: str = ""
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
    kv_layout: str = ""
    kv_tickets: bool = False
    kv_rooms: str = ""
    bootstrap: tuple[str, int] | None = None
    phase: Phase = "both"
    refusals: tuple[Refusal, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    asleep: int = 0
    address: Address | None = None
    dials: bool = False
    probe: Probe | None = None
    secret_fingerprint: str = ""
    self_check: SelfCheck | None = None
    rollout: Rollout = Rollout()
    canary: CanaryResult | None = None
    embedding: EmbeddingCard | None = None
    media: MediaSpec | None = None
    stage: Stage | None = None
    image: ImageFacts | None = None
    audio: AudioFacts | None = None
    hidden_layers: int | None = None
    projected_size: int | None = None
    protocol: int = PROTOCOL

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that its vectors have; workers of one pool give the same."""
        return () if self.embedding is None else tuple(one.name for one in self.embedding.outputs)

    @property
    def is_inner(self) -> bool:
        """True for a part of a model that clients do not see."""
        return self.stage is not None and self.name != self.stage.whole

    @property
    def role(self) -> Task:
        """The task that its pool is for: the first. Encoding is a pool's own where it is alone."""
        return self.tasks[0] if self.tasks else Task.GENERATE


EMBEDS_OFF = "You must set --enable-prompt-embeds on its workers"
"""Value of `ModelCard.prompt_embeds` of a worker started without `--enable-prompt-embeds`."""
