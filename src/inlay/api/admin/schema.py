"""Requests and responses of the admin routes: adapters, as in vLLM and more, and workers."""

from typing import Literal

import msgspec

from inlay.base.errors import ErrorBody


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location of an adapter's files.

    Attributes:
        uri: file://, https://, s3://bucket/prefix or hf://owner/name[@revision][/directory].
        sha256: of its adapter_model.safetensors, 64 hex digits; not checked when absent.
    """

    uri: str
    sha256: str | None = None


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to load an adapter from `lora_path` or from `source`.

    Attributes:
        lora_name: name that clients will use as `model`; needed.
        lora_path: a directory of the worker's machine, or an address as in `source`.
        load_inplace: replace a loaded adapter of that name; false when absent.
        base_model_name: name of the base model; needed where several models generate.
        is_3d_lora_weight: as vLLM's; only false is supported.
        source: its address and digest, in place of `lora_path`; one of the two is needed.
    """

    lora_name: str = ""
    lora_path: str = ""
    source: AdapterSource | None = None
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class UnloadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to unload an adapter.

    Attributes:
        lora_name: of the adapter; needed.
        lora_int_id: as vLLM's; ignored.
        drain_timeout: seconds that running requests have before they are aborted, 0 to 1800; the
            worker's own setting when absent.
    """

    lora_name: str = ""
    lora_int_id: int | None = None
    drain_timeout: float | None = None


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter on one worker.

    Attributes:
        id: its name.
        worker: id of the worker.
        parent: name of the base model.
        root: path or URI it was loaded from.
        state: requests are accepted in state "ready" only.
        kind: "lora", or "prompt": trained embedding vectors before every prompt.
        content_id: digest of its files.
        rank: rank of a LoRA.
        num_positions: positions of a trained prompt.
        running: running requests.
        reason: cause of the failure.
    """

    id: str
    object: Literal["adapter"] = "adapter"
    worker: str
    parent: str
    root: str
    state: Literal["loading", "ready", "draining", "failed"]
    kind: Literal["lora", "prompt"] | None = None
    content_id: str | None = None
    rank: int = 0
    num_positions: int = 0
    running: int = 0
    reason: str | None = None


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters on all workers, whatever their state."""

    object: Literal["list"] = "list"
    data: list[AdapterEntry]


class WorkerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a command on one worker.

    Attributes:
        id: the worker's id.
        model: name of the model it serves.
        status: HTTP status of the command; 200 for success.
        error: the error, where `status` is not 200.
        blocks: cached blocks that were freed; blocks of running requests stay.
        level: sleep level.
        awake: True if weights and KV cache are both restored.
    """

    id: str
    model: str
    status: int
    error: ErrorBody | None = None
    blocks: int | None = None
    level: int | None = None
    awake: bool | None = None


class CacheReset(msgspec.Struct, frozen=True):
    """Response of `/reset_prefix_cache` and `/clear_kv_blocks`.

    `success` is True if every worker succeeded.
    """

    success: bool
    workers: list[WorkerAnswer]


class Asleep(msgspec.Struct, frozen=True):
    """Response of `/sleep`."""

    status: Literal["sleeping"]
    level: int
    workers: list[WorkerAnswer]


class Awake(msgspec.Struct, frozen=True):
    """Response of `/wake_up`; "sleeping" until every worker is fully awake."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None
    workers: list[WorkerAnswer]


class DrainStarted(msgspec.Struct, frozen=True):
    """Response of `/drain`: the worker takes no more requests and ends after those it has."""

    status: Literal["draining"]
    worker: str


class WorkerSleep(msgspec.Struct, frozen=True):
    """Sleep level of one worker; 0 while it is awake."""

    id: str
    model: str
    level: int


class IsSleeping(msgspec.Struct, frozen=True):
    """Response of `/is_sleeping`: True if any worker sleeps."""

    is_sleeping: bool
    workers: list[WorkerSleep]
