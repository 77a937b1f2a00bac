"""Quotas of clients: running requests, bytes held, and request rate."""

import time
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from inlay.base.errors import RateLimitedError
from inlay.http.callers.auth import Caller
from inlay.http.callers.keys import ClientLimits
from inlay.http.settings import FrontendSettings

RETRY_AFTER = 1.0
"""`Retry-After` in seconds, where nothing more exact is known."""

_SWEEP_AT = 4096
"""Number of clients from which idle ones are removed before another is added."""

DECODED_SHARE = 0.75
"""Decoded bytes of each base64 character."""


class Client:
    """One client; a `with` block counts one running request.

    Attributes:
        name: name of its key, or its address.
        share: its limits; None in a field is no limit but the server's.
        requests: running requests.
        bytes: bytes held.
    """

    __slots__ = ("_clients", "bucket", "bytes", "name", "requests", "share")

    def __init__(self, clients: "Clients", name: str, share: ClientLimits) -> None:
        self._clients = clients
        self.name = name
        self.share = share
        self.bucket: TokenBucket | None = None
        self.requests = 0
        self.bytes = 0

    @property
    def idle(self) -> bool:
        """True if its state is that of a new client, so that it can be removed."""
        return not self.requests and not self.bytes and (self.bucket is None or self.bucket.full)

    def __enter__(self) -> "Client":
        """Begin a request. Raises `RateLimitedError` if the quota or the rate is exceeded."""
        most = self.share.max_requests
        if most is not None and self.requests >= most:
            raise RateLimitedError(
                f"you have {self.requests} requests under way, which is your share "
                "(--max-client-requests)",
                retry_after=RETRY_AFTER,
            )
        if self.bucket is not None:
            wait = self.bucket.take()
            if wait:
                raise RateLimitedError(
                    f"you may make {self.bucket.rate:g} requests a minute; ask again in {wait:.1f} "
                    "s (--max-client-rate)",
                    retry_after=wait,
                )
        self.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.requests -= 1
        self._clients.left(self.name, self)


class Clients:
    """Clients with running requests or a token bucket that is not full.

    A client is a tenant or, where no key is asked for, an address; the addresses of one IPv6 /64
    are one client, as they are one subscriber's.

    Args:
        settings: defaults for keys without limits of their own.
        clock: monotonic seconds.
    """

    def __init__(
        self, settings: FrontendSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = default_share(settings)
        self._clock = clock
        self._known: dict[str, Client] = {}
        self._sweep_at = _SWEEP_AT

    def __len__(self) -> int:
        return len(self._known)

    def of(self, caller: Caller, address: str) -> Client:
        """Return the client of a request.

        Args:
            caller: the authenticated caller.
            address: the peer's address; "" if it has none.
        """
        name = f"key {caller.tenant.id}" if caller.tenant.id else f"address {network(address)}"
        share = self.share_of(caller)
        client = self._known.get(name)
        if client is None:
            if len(self._known) >= self._sweep_at:
                self._known = {
                    known: other for known, other in self._known.items() if not other.idle
                }
                self._sweep_at = max(_SWEEP_AT, 2 * len(self._known))
            client = self._known[name] = Client(self, name, share)
        client.share = share
        if share.rate is None:
            client.bucket = None
        elif client.bucket is None:
            client.bucket = TokenBucket(share.rate, self._clock)
        elif client.bucket.rate != share.rate:
            client.bucket.set_rate(share.rate)
        return client

    def share_of(self, caller: Caller) -> ClientLimits:
        """Return the limits of a caller, with the defaults where its key sets none."""
        return _joined(caller.share, self._share)

    def left(self, name: str, client: Client) -> None:
        """Remove a client that is idle."""
        if client.idle and self._known.get(name) is client:
            del self._known[name]


def default_share(settings: FrontendSettings) -> ClientLimits:
    """Return the limits of a client whose key sets none.

    They are half of the server's, but at least one request of the maximum size.
    """
    requests = settings.max_client_requests or max(1, settings.max_inflight_requests // 2)
    largest = int(settings.max_body_bytes * (1 + DECODED_SHARE))
    size = settings.max_client_bytes or max(settings.max_inflight_bytes // 2, largest)
    # A limit equal to the server's is dropped: the error is then that of the server's limit.
    return ClientLimits(
        settings.max_client_rate,
        None if requests >= settings.max_inflight_requests else requests,
        None if size >= settings.max_inflight_bytes else size,
    )


def _joined(own: ClientLimits, rest: ClientLimits) -> ClientLimits:
    return ClientLimits(
        rest.rate if own.rate is None else own.rate,
        rest.max_requests if own.max_requests is None else own.max_requests,
        rest.max_bytes if own.max_bytes is None else own.max_bytes,
    )


@lru_cache(4096)
def network(address: str) -> str:
    """Return the part of an address that identifies a client."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Address(int(parsed) >> 64 << 64)) + "/64"


class TokenBucket:
    """Token bucket that fills at `rate` tokens a minute and holds one minute's tokens.

    A request takes one token. After a minute without requests, a client may send `rate` requests
    at once, and `rate` a minute from then on.

    Args:
        rate: tokens a minute, more than 0.
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_level", "_seen", "rate")

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._level = self.capacity
        self._seen = clock()

    @property
    def capacity(self) -> float:
        """Maximum number of tokens: at least one, or no request could ever be made."""
        return max(1.0, self.rate)

    @property
    def full(self) -> bool:
        """True if it is full, as a new bucket is."""
        self._fill()
        return self._level >= self.capacity

    def set_rate(self, rate: float) -> None:
        """Change the rate."""
        self._fill()
        self.rate = rate
        self._level = min(self._level, self.capacity)

    def take(self) -> float:
        """Take a token. Return 0, or the seconds until there will be one."""
        self._fill()
        # Tolerance for rounding: a client that waits exactly `Retry-After` is admitted.
        if self._level >= 1.0 - 1e-9:
            self._level = max(0.0, self._level - 1.0)
            return 0.0
        return (1.0 - self._level) * 60.0 / self.rate

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._seen) * self.rate / 60.0)
        self._seen = now
