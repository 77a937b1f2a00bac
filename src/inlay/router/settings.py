"""Settings of routing.

The flags, environment variables and config keys of whatever has a router.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RouterSettings(BaseModel):
    """Which worker gets a request, and how many requests may wait for one."""

    model_config = ConfigDict(frozen=True)

    router_policy: Literal["kv", "least-loaded", "power-of-two", "round-robin"] = Field(
        default="kv",
        description="How a worker is chosen: kv weighs what each has cached of the prompt against its load; least-loaded and "
        "power-of-two (the less loaded of two at random) look at the load alone, round-robin at nothing.",
    )
    router_prefill_weight: float = Field(
        default=1.0,
        ge=0,
        description="What a position costs that a worker still has to compute of a prompt: of this one, where it has not cached "
        "it, and of those before it.",
    )
    router_decode_weight: float = Field(
        default=0.05,
        ge=0,
        description="What a position costs of a sequence that a worker is decoding. Higher values spread sequences more evenly and "
        "follow the caches less.",
    )
    router_session_slack: float = Field(
        default=0.25,
        ge=0,
        description="A session stays with its worker while that has at most so much more under way than the average worker.",
    )
    router_cache_ttl: float = Field(
        default=120.0,
        gt=0,
        description="Of workers that do not tell what they have cached: seconds a prompt is thought to stay cached where it was sent.",
    )
    router_worker_backlog: float = Field(
        default=1.0,
        ge=0,
        description="Works that may wait at a worker, as a multiple of those it runs at a time (max_num_seqs). The others wait in "
        "the router for whichever has room first.",
    )
    router_queue_size: int = Field(
        default=4096,
        ge=0,
        description="Works that may wait in the router when all workers are full; over it the answer is 503. One client may have half.",
    )
    router_queue_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds a work may wait in the router; over it the answer is 503. No bound unless set.",
    )
