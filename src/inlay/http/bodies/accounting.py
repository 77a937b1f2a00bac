"""Limits and memory of requests: bodies, parsed JSON, decoded tensors, rows.

Memory is reserved before it is taken.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from threading import Condition, Lock

import msgspec

from inlay.base.errors import (
    BodyTooLargeError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
)
from inlay.base.pace import check_wanted, yield_gil
from inlay.http.bodies.structure import Counts, check_structure, count
from inlay.http.callers.clients import RETRY_AFTER, Client, default_share
from inlay.http.settings import AUTO, MIB, FrontendSettings
from inlay.messages.card import EMBEDS_OFF, ModelCard
from inlay.messages.prompt import DTYPE_SIZES, Media, Prompt, Rows
from inlay.tensors import ReadLimits

OVERHEAD_BYTES = 64 * 1024
"""Allowance for a container's bytes beside the elements.

Zip entries padded to 64 bytes, a header, metadata.
"""

_TOTAL_FLAG = "--max-request-embeds-bytes"
_BODY_FLAG = "--max-body-bytes"
_BUDGET_FLAG = "--max-inflight-bytes"
_SHARE_FLAG = "--max-client-bytes"

_LEAST_AUTO = 10 * MIB
"""Smallest limit that `auto` means.

A file may hold several prompts, and one somewhat longer than the context is told so.
"""


class EmbedsLimits:
    """Limits of one server.

    Args:
        settings: of the frontend.
        models: returns the cards of the served models; `auto` depends on them.

    Attributes:
        max_prompts: maximum prompts in the batch of one tensor.
    """

    def __init__(
        self, settings: FrontendSettings, models: Callable[[], Iterable[ModelCard]]
    ) -> None:
        self._max_bytes = settings.max_prompt_embeds_bytes
        share = default_share(settings).max_bytes
        self._most = min(
            ReadLimits(max_bytes=settings.max_request_embeds_bytes, flag=_TOTAL_FLAG),
            ReadLimits(max_bytes=settings.max_body_bytes, flag=_BODY_FLAG),
            ReadLimits(max_bytes=settings.max_inflight_bytes, flag=_BUDGET_FLAG),
            ReadLimits(max_bytes=share or settings.max_inflight_bytes, flag=_SHARE_FLAG),
            key=lambda limits: limits.max_bytes,
        )
        self._max_parts = settings.max_prompt_embeds_parts
        self._max_total = settings.max_request_embeds_bytes
        self._max_json = settings.max_json_bytes
        self._models = models
        self.max_prompts = settings.max_choices

    @property
    def off_everywhere(self) -> bool:
        """True if all models' workers were started without embeddings as prompts."""
        cards = list(self._models())
        return bool(cards) and all(card.prompt_embeds == EMBEDS_OFF for card in cards)

    def of(self, card: ModelCard) -> ReadLimits:
        """Return the limits of one tensor file for a model."""
        if self._max_bytes != AUTO:
            return ReadLimits(max_bytes=self._max_bytes)
        rows = card.limits.max_model_len * card.hidden_size * DTYPE_SIZES["float32"]
        return self._at_most(max(rows + OVERHEAD_BYTES, _LEAST_AUTO))

    def _at_most(self, size: int) -> ReadLimits:
        return self._most if size > self._most.max_bytes else ReadLimits(max_bytes=size)

    @property
    def any(self) -> ReadLimits:
        """Limits of a tensor file whose model is not known yet: the largest of all models.

        Where no model is known either, the smallest that `auto` means.
        """
        if self._max_bytes != AUTO:
            return ReadLimits(max_bytes=self._max_bytes)
        found = list(map(self.of, self._models())) or [self._at_most(_LEAST_AUTO)]
        return max(found, key=attrgetter("max_bytes"))

    def check_count(self, kinds: Sequence[str], param: Callable[[int], str]) -> None:
        """Check the number of embeddings and media of one request.

        Args:
            kinds: name of the kind of each, in the plural.
            param: returns the place of one of them, by its index.

        Raises:
            InvalidRequestError: they are too many; names the kinds and the first one too many.
        """
        if len(kinds) <= self._max_parts:
            return
        counts = " and ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
        together = "together " if len(set(kinds)) > 1 else ""
        raise InvalidRequestError(
            f"the request has {counts}; {together}at most {self._max_parts} are allowed "
            "(--max-prompt-embeds-parts)",
            param=param(self._max_parts),
        )

    def check_total(self, num_bytes: int) -> None:
        """Raise `BodyTooLargeError` if a request's embeddings are too large, decoded."""
        if num_bytes > self._max_total:
            raise BodyTooLargeError(
                f"the prompt_embeds of the request, with images, come to {num_bytes} bytes; at "
                f"most {self._max_total} are allowed ({_TOTAL_FLAG})",
                param="prompt_embeds",
            )

    def check_json(self, num_bytes: int) -> None:
        """Raise `BodyTooLargeError` for too much JSON; extracted base64 strings do not count."""
        if num_bytes > self._max_json:
            raise BodyTooLargeError(
                f"the body has {num_bytes} bytes of JSON text or more, which is over the limit of "
                f"{self._max_json} bytes (--max-json-bytes). Only strings of tensor data in base64 "
                "(`prompt_embeds`, `data`) and data: URLs of 64 KB or more do not count; other "
                "base64 is text"
            )


class ByteBudget:
    """Memory budget of all requests together.

    Attributes:
        limit: maximum bytes.
        used: bytes held now.
        taken: total bytes reserved since the start.
        lent: bytes held by blocks of `Reservation.lend`, half of the limit at most.
        freed: notified when memory is given back.
    """

    __slots__ = ("freed", "lent", "limit", "lock", "taken", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.taken = 0
        self.lent = 0
        self.lock = Lock()
        self.freed = Condition(self.lock)


class Reservation:
    """Bytes of one request, counted in a `ByteBudget` and in its client's quota.

    They are given back at the end of its `with` block. Safe to call from any thread: bodies are
    received on the event loop and decoded off it.

    Attributes:
        size: bytes held.
        client: the client whose quota they count in. Set before any bytes are reserved.
    """

    __slots__ = ("_budget", "client", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.client: Client | None = None
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Reserve up to `size` bytes in all.

        Raises:
            BodyTooLargeError: more than any request may hold.
            RateLimitedError: the client's quota is used up.
            OverloadedError: the server's budget is used up.
        """
        with self._budget.lock:
            self._take(size - self.size)

    def grow(self, more: int) -> None:
        """Reserve `more` bytes. Raises as `grow_to`."""
        with self._budget.lock:
            self._take(more)

    def _take(self, more: int) -> None:
        if more <= 0:
            return
        self._check(self.size + more, more)
        self._budget.used += more
        self._budget.taken += more
        self.size += more
        if self.client is not None:
            self.client.bytes += more

    @contextmanager
    def lend(self, size: int) -> Iterator[None]:
        """Hold `size` bytes more for a block, once the budget and the client's quota have them.

        A block that is alone may pass both, so that requests that hold memory and wait for more do
        not wait for each other. Not on the event loop. Raises as `check_wanted` meanwhile.
        """
        budget, client = self._budget, self.client
        with budget.lock:
            while budget.lent and not self._has(size):
                budget.freed.wait(_LOOK_SECONDS)
                check_wanted()
            budget.lent += size
            budget.used += size
            if client is not None:
                client.bytes += size
        try:
            yield
        finally:
            with budget.lock:
                budget.lent -= size
                budget.used -= size
                if client is not None:
                    client.bytes -= size
                budget.freed.notify_all()

    def _has(self, more: int) -> bool:
        budget = self._budget
        held = 0 if self.client is None else self.client.bytes
        return (
            budget.lent + more <= budget.limit // 2
            and budget.used + more <= budget.limit
            and held + more <= self._share
        )

    @property
    def _share(self) -> int:
        """Bytes of its client at most."""
        limit = self._budget.limit
        client = self.client
        most = None if client is None else client.share.max_bytes
        return limit if most is None else min(most, limit)

    def _check(self, size: int, more: int) -> None:
        budget, client, share = self._budget, self.client, self._share
        if size > share:
            raise BodyTooLargeError(
                f"the request takes {size} bytes with what it decodes to; one client may hold "
                f"{share} ({_BUDGET_FLAG if share == budget.limit else _SHARE_FLAG})"
            )
        if client is not None and share < budget.limit and client.bytes + more > share:
            raise RateLimitedError(
                f"your requests hold {client.bytes} bytes; {more} more would pass your share of "
                f"{share} ({_SHARE_FLAG})",
                retry_after=RETRY_AFTER,
            )
        if budget.used + more > budget.limit:
            raise OverloadedError(
                f"the server holds {budget.used} bytes of requests; {more} more would pass its "
                f"limit of {budget.limit} ({_BUDGET_FLAG})",
                retry_after=RETRY_AFTER,
            )

    def shrink_to(self, size: int) -> None:
        """Release all but `size` bytes."""
        with self._budget.lock:
            less = self.size - size
            if less > 0:
                self._budget.freed.notify_all()
                self._budget.used -= less
                self.size = size
                if self.client is not None:
                    self.client.bytes -= less

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink_to(0)


def bytes_alive(prompts: Iterable[Prompt]) -> int:
    """Return the bytes of memory that the rows and media of `prompts` keep alive.

    Rows may be a view of their file, which then lives as long as the rows; shared memory counts
    once.
    """
    alive: dict[int, int] = {}
    for prompt in prompts:
        for segment in prompt.segments:
            if isinstance(segment, Rows):
                held = [segment.data, *(field.data for field in segment.bundle)]
            elif isinstance(segment, Media) and segment.data is not None:
                held = [segment.data]
            else:
                continue
            for buffer in held:
                owner = buffer.view.obj
                alive[id(owner)] = memoryview(owner).nbytes
    return sum(alive.values())


_MADE = {"objects": 176, "arrays": 64, "colons": 48, "commas": 64}
"""Maximum bytes of the objects that the parser makes for each such character.

Measured with CPython 3.11 and msgspec.
"""

_WIDE = 7
"""Maximum bytes of a character while a string with non-ASCII characters is parsed.

4 for the character, and 3 for growing the buffer.
"""

_SMALL = 4096
"""Bytes of JSON below which the worst case is assumed instead of counting."""

_WORST = 24

_LOOK_SECONDS = 0.1
"""Seconds between two looks of who waits for memory whether its request is still wanted."""

_AT_ONCE = 512
"""Items that are measured before other threads may run."""


class RequestMemory:
    """Accounting of one request's memory, from its body to its prompts.

    Safe to call from any thread, by one at a time.

    Args:
        reservation: of the request; it holds the body.
        limits: of its embeddings.

    Attributes:
        json: bytes of the parsed JSON, without the extracted embeddings.
    """

    __slots__ = (
        "_arrived", "_beside", "_body", "_inline", "_limits", "_parsed", "_reservation", "_whole",
        "json",
    )  # fmt: skip

    def __init__(self, reservation: Reservation, limits: EmbedsLimits) -> None:
        self._reservation = reservation
        self._limits = limits
        self._body = reservation.size
        self._parsed = 0
        self._arrived = 0
        self._inline = 0
        self._whole = 0
        self._beside = 0
        self.json = 0

    def parsing(self, rest: bytes | bytearray) -> None:
        """Reserve the maximum memory of parsing `rest` as JSON.

        Raises:
            BodyTooLargeError: it is over `--max-json-bytes`.
            InvalidRequestError: as `check_structure`.
            InlayError: as `Reservation.grow_to`.
        """
        self._limits.check_json(len(rest))
        self.json = max(self.json, len(rest))
        if len(rest) < _SMALL:
            size = len(rest) * _WORST
        else:
            counts = count(rest)
            check_structure(rest, counted=counts)
            size = parsed_size(counts)
        self._parsed = max(self._parsed, size)
        self._reservation.grow_to(self._beside + self._body + self._parsed)

    def on_reassembled(self, size: int) -> None:
        """Reserve a reassembled body of `size` bytes, beside its extracted pieces.

        Raises as `Reservation.grow_to`.
        """
        self._body += size
        self._reservation.grow_to(self._beside + self._body)

    def on_decoded(self, sizes: Iterable[int]) -> None:
        """Count embeddings that were decoded while the body arrived, of `sizes` bytes each.

        Their memory is reserved as that of the body.

        Raises:
            BodyTooLargeError: the request's embeddings are over the limit.
        """
        self._arrived = sum(sizes)
        self._check_total()

    def decoding(self, sizes: Iterable[int]) -> None:
        """Reserve embeddings that are decoded from the JSON, of `sizes` bytes each.

        Raises as `check_total` and as `Reservation.grow_to`.
        """
        self._inline = sum(sizes)
        self._check_total()
        self._reservation.grow_to(self._beside + self._body + self._parsed + self._inline)

    def body_freed(self, kept: int = 0) -> None:
        """Release the body, but for embeddings decoded as it arrived and `kept` bytes of files."""
        self._body = kept + self._arrived
        self._reservation.shrink_to(self._beside + self._body + self._parsed + self._inline)

    def hold(self, size: int) -> None:
        """Reserve `size` bytes until the request ends. Raises as `Reservation.grow`."""
        self._reservation.grow(size)
        self._beside += size

    def check_total(self, sizes: Iterable[int]) -> None:
        """Count embeddings of files or stored prompts, which take no further memory.

        Raises:
            BodyTooLargeError: the request's embeddings are over the limit.
        """
        self._whole += sum(sizes)
        self._check_total()

    def settle(self, prompts: Iterable[Prompt], kept: int) -> None:
        """Release all but the rows of `prompts` and the `kept` bytes of the parsed request."""
        self._reservation.shrink_to(self._beside + bytes_alive(prompts) + kept)

    def _check_total(self) -> None:
        self._limits.check_total(self._arrived + self._inline + self._whole)


def parsed_size(counts: Counts) -> int:
    """Return the maximum bytes of parsing a JSON text, from the counts of its characters."""
    made: int = sum(getattr(counts, name) * size for name, size in _MADE.items())
    return counts.size * (_WIDE if counts.wide else 1) + made


def size_of(request: msgspec.Struct, *without: str) -> int:
    """Return the approximate bytes of a parsed request, without the fields `without`."""
    items: list[object] = [
        value
        for name in request.__struct_fields__
        if (value := getattr(request, name)) is not None and name not in without
    ]
    size = done = 0
    while items:
        done += 1
        if done % _AT_ONCE == 0:
            yield_gil()
        item = items.pop()
        size += sys.getsizeof(item)
        if isinstance(item, dict):
            items.extend(item)
            items.extend(item.values())
        elif isinstance(item, list):
            items.extend(item)
    return size
