"""Requests and responses of the admin routes: adapters, as in vLLM and more, and workers."""

from typing import Annotated, Literal

import msgspec

from inlay.api.schema.described import ModelName
from inlay.base.errors import ErrorBody
from inlay.messages.fields import example, field


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location of an adapter's files.

    Attributes:
        uri: file://, https://, s3://bucket/prefix or hf://owner/name[@revision][/directory].
        sha256: of its adapter_model.safetensors, 64 hex digits; not checked when absent.
    """

    uri: Annotated[str, example("hf://somebody/my-adapter")]
    sha256: Annotated[
        str | None, example("0000000000000000000000000000000000000000000000000000000000000000")
    ] = None


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

    lora_name: Annotated[str, example("my-adapter")] = ""
    lora_path: Annotated[str, example("/adapters/mine")] = ""
    source: Annotated[
        AdapterSource | None,
        example(
            {
                "sha256": "0000000000000000000000000000000000000000000000000000000000000000",
                "uri": "hf://somebody/my-adapter",
            }
        ),
    ] = None
    load_inplace: bool = False
    base_model_name: Annotated[str | None, example("my-model")] = None
    is_3d_lora_weight: Annotated[bool, example(False)] = False


class UnloadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to unload an adapter.

    Attributes:
        lora_name: of the adapter; needed.
        lora_int_id: as vLLM's; ignored.
        drain_timeout: seconds that running requests have before they are aborted, 0 to 1800; the
            worker's own setting when absent.
    """

    lora_name: Annotated[str, example("my-adapter")] = ""
    lora_int_id: Annotated[int | None, example(1)] = None
    drain_timeout: Annotated[float | None, example(30)] = None


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

    id: Annotated[str, example("my-adapter")]
    object: Literal["adapter"] = "adapter"
    worker: Annotated[str, example("w-5d0f")]
    parent: Annotated[str, example("my-model")]
    root: Annotated[str, example("my-model")]
    state: Literal["loading", "ready", "draining", "failed"]
    kind: Literal["lora", "prompt"] | None = None
    content_id: Annotated[str | None, example("9f86d081884c7d65")] = None
    rank: Annotated[int, example(8)] = 0
    num_positions: Annotated[int, example(20)] = 0
    running: Annotated[int, example(3)] = 0
    reason: Annotated[str | None, example("adapter_config.json is missing")] = None


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters on all workers, whatever their state."""

    object: Literal["list"] = "list"
    data: Annotated[list[AdapterEntry], field("the entries.")]


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

    id: Annotated[str, example("w-5d0f")]
    model: Annotated[str, example("my-model")]
    status: Annotated[int, example(200)]
    error: ErrorBody | None = None
    blocks: Annotated[int | None, example(512)] = None
    level: Annotated[int | None, example(1)] = None
    awake: bool | None = None


class CacheReset(msgspec.Struct, frozen=True):
    """Response of `/reset_prefix_cache` and `/clear_kv_blocks`.

    `success` is True if every worker succeeded.
    """

    success: Annotated[bool, field("True if every worker succeeded.")]
    workers: Annotated[list[WorkerAnswer], field("the workers, each with its result.")]


class Asleep(msgspec.Struct, frozen=True):
    """Response of `/sleep`."""

    status: Literal["sleeping"]
    level: Annotated[int, field("level of sleep: 1 or 2, 0 while it is awake.", 1)]
    workers: Annotated[list[WorkerAnswer], field("the workers, each with its result.")]


class Awake(msgspec.Struct, frozen=True):
    """Response of `/wake_up`; "sleeping" until every worker is fully awake."""

    status: Annotated[
        Literal["awake", "sleeping"],
        field("`sleeping` until every worker is wholly awake.", "awake"),
    ]
    tags: Annotated[
        list[str] | None, field("parts that were asked to wake; null for all.", ["weights"])
    ]
    workers: Annotated[list[WorkerAnswer], field("the workers, each with its result.")]


class DrainStarted(msgspec.Struct, frozen=True):
    """Response of `/drain`: the worker takes no more requests and ends after those it has."""

    status: Literal["draining"]
    worker: Annotated[str, field("id of the worker.", "w-5d0f")]


class WorkerSleep(msgspec.Struct, frozen=True):
    """Sleep level of one worker; 0 while it is awake."""

    id: Annotated[str, field("id of the worker.", "w-5d0f")]
    model: ModelName
    level: Annotated[int, field("level of sleep: 1 or 2, 0 while it is awake.", 1)]


class IsSleeping(msgspec.Struct, frozen=True):
    """Response of `/is_sleeping`: True if any worker sleeps."""

    is_sleeping: Annotated[bool, field("True if any worker sleeps.", False)]
    workers: Annotated[list[WorkerSleep], field("the workers, each with its result.")]
