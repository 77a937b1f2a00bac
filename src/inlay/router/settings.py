"""Settings of routing.

The flags, environment variables and config keys of whatever has a router.
"""

from typing import Literal

from pydantic import BaseModel, Field


class RouterSettings(BaseModel, frozen=True, defer_build=True):
    """Choice of a worker, and bounds of waiting requests."""

    router_policy: Literal["kv", "least-loaded", "power-of-two", "round-robin"] = "kv"
    """Choice of a worker. kv weighs its cached part of the prompt against its load; least-loaded
    and power-of-two (the less loaded of two at random) consider only loads, round-robin nothing."""
    router_prefill_weight: float = Field(default=1.0, ge=0)
    """Cost of a prompt position that a worker still has to compute: of this prompt, unless cached,
    and of those before it."""
    router_decode_weight: float = Field(default=0.05, ge=0)
    """Cost of a position of a sequence that a worker is decoding. Higher values spread sequences
    more evenly and follow the caches less."""
    router_fetch_weight: float = Field(default=0.2, ge=0)
    """Cost of a prompt position whose KV page is fetched from another worker, beside one that is
    computed, until it has been measured. At workers with --enable-kv-fetch."""
    router_interference_weight: float = Field(default=0.005, ge=0)
    """Cost of a position computed at a worker of --role decode, for each request that it delays
    there: the strength of roles. With 0.25 tokens come most evenly and first tokens later. Roles
    count where four such requests cost more than fetching the prompt: not by default."""
    router_session_slack: float = Field(default=0.25, ge=0)
    """A session stays with its worker while that runs at most so much more than the average
    worker."""
    router_cache_ttl: float = Field(default=120.0, gt=0)
    """Seconds for which a sent prompt counts as cached, at workers that publish no cache events."""
    router_worker_backlog: float = Field(default=1.0, ge=0)
    """Requests that may wait at a worker, as a multiple of max_num_seqs. The others wait in the
    router for the first worker with room."""
    router_queue_size: int = Field(default=4096, ge=0)
    """Requests that may wait in the router when all workers are full; over it the answer is 503.
    One client may have half."""
    router_absent_wait: float = Field(default=0.0, ge=0)
    """Seconds that a request may wait for a worker of a model that has none, as while one is
    started from zero; over it, and by default at once, the answer is 503. Such models are not
    forgotten after an hour."""
    router_queue_timeout: float | None = Field(default=None, gt=0)
    """Seconds a request may wait in the router; over it the answer is 503. No bound unless set."""
