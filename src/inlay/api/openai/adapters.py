"""Adapters at run time: vLLM's requests, and where an adapter may come from beside a directory."""

from typing import Literal

import msgspec


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an adapter is.

    Attributes:
        uri: file://, https://, s3://bucket/prefix or hf://owner/name[@revision][/directory].
        sha256: of its adapter_model.safetensors, 64 hex digits.
    """

    uri: str
    sha256: str | None = None


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load an adapter. Either `lora_path` or `source` says where it is.

    Attributes:
        lora_name: what clients will call it.
        lora_path: a directory of the worker's machine, or an address as in `source`.
        load_inplace: it may take the place of another of that name.
        base_model_name: of the model it is for, where several are served.
        is_3d_lora_weight: as vLLM's; only false is supported.
    """

    lora_name: str = ""
    lora_path: str = ""
    source: AdapterSource | None = None
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class UnloadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unload an adapter.

    Attributes:
        lora_name: of the adapter.
        lora_int_id: as vLLM's; not looked at.
        drain_timeout: seconds its running requests get before they are aborted; as the worker was
            started unless given.
    """

    lora_name: str = ""
    lora_int_id: int | None = None
    drain_timeout: float | None = None


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter on one worker.

    Attributes:
        id: its name.
        worker: that has it.
        parent: the model it is for.
        root: where it came from.
        state: it takes requests only when "ready".
        kind: "lora", or "prompt": trained rows before every prompt.
        content_id: digest of its files.
        rank: of a LoRA.
        num_positions: of a prompt.
        running: requests under way.
        reason: why it failed.
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
