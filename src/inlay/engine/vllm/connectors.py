"""`--connector`: short names for what vLLM's `--kv-transfer-config` says at length.

The mapping is that of Dynamo's vLLM worker: https://github.com/ai-dynamo/dynamo,
`components/src/dynamo/vllm/args.py`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.tickets import LEASE_SECONDS, Ranks

_NIXL: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    # What does not come is computed. vLLM's default is to end the request with an error.
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
}

CONNECTORS: dict[str, dict[str, Any]] = {
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "nixl": {**_NIXL, "kv_connector_module_path": "inlay.engine.vllm.nixl"},
    "kvbm": {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
    },
}

_PD = {
    "kv_connector": "PdConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}

_TICKETS = "tickets-2"
"""The form of tickets: one of another is not read."""


def transfer_config(settings: EngineSettings) -> dict[str, Any] | None:
    """VLLM's KV transfer configuration, or None for none.

    Raises:
        InvalidRequestError: it is said twice, is not a JSON object, names connectors that do not
            go together, or has no place beside a role.
    """
    names = settings.library.connector
    if settings.kv.role != "both":
        if settings.library.kv_transfer_config is not None or names not in ([], ["nixl"]):
            raise InvalidRequestError(
                f"--role {settings.kv.role} needs --connector nixl, which it implies, and no other",
                param="role",
            )
        names = ["nixl"]
    if settings.library.kv_transfer_config is not None:
        if names:
            raise InvalidRequestError(
                "--connector is short for --kv-transfer-config: give one of them", param="connector"
            )
        try:
            given = json.loads(settings.library.kv_transfer_config)
        except ValueError as error:
            raise InvalidRequestError(
                f"--kv-transfer-config is not JSON: {error}", param="kv_transfer_config"
            ) from error
        if not isinstance(given, dict):
            raise InvalidRequestError(
                f"--kv-transfer-config must be a JSON object, got {given!r}",
                param="kv_transfer_config",
            )
        return given
    return expanded(names)


def expanded(names: Sequence[str]) -> dict[str, Any] | None:
    """The configuration that a list of connectors stands for.

    Raises:
        InvalidRequestError: they do not go together.
    """
    if len(set(names)) != len(names):
        raise InvalidRequestError(
            f"--connector names one of {' '.join(names)} twice", param="connector"
        )
    if "none" in names:
        if len(names) > 1:
            raise InvalidRequestError("--connector none stands alone", param="connector")
        return None
    several = [name for name in names if name != "pd"]
    if "pd" in names and len(several) < 2:
        raise InvalidRequestError(
            "--connector pd joins connectors: name it with two of lmcache, nixl, kvbm",
            param="connector",
        )
    if not several:
        return None
    if len(several) == 1:
        return CONNECTORS[several[0]]
    if several[-1] != "nixl" or len(several) > 2:
        raise InvalidRequestError(
            "several connectors are a cache and then what moves blocks between workers: kvbm "
            "nixl, or lmcache nixl; got " + " ".join(several),
            param="connector",
        )
    return {
        **_PD,
        # No tickets are made there: vLLM's own will do.
        "kv_connector_extra_config": {"connectors": [CONNECTORS[several[0]], _NIXL]},
    }


def gives_tickets(config: Mapping[str, Any] | None) -> bool:
    """True if a worker with this configuration hands prompts over to others of its fleet."""
    return config == CONNECTORS["nixl"]


def check_hand_over(config: Any) -> None:
    """Raise `InvalidRequestError` for a vLLM whose prompts cannot be handed over."""
    drafts = config.speculative_config
    if drafts is not None and drafts.method != "ngram":
        raise InvalidRequestError(
            f"--connector nixl with drafts of the method {drafts.method!r} was never run: what "
            "drafts has keys and values of its own",
            param="speculative_config",
        )


def ranks_of(config: Any) -> Ranks:
    """The ranks of a vLLM, as its connector counts them. `config` is vLLM's."""
    parallel = config.parallel_config
    positions = int(parallel.decode_context_parallel_size)
    return (
        max(int(parallel.tensor_parallel_size), positions),
        positions,
        int(parallel.pipeline_parallel_size),
    )


def block_layout(config: Any, version: str) -> str:
    """`ModelCard.kv_layout` of a vLLM: equal where its blocks go from one to the other.

    vLLM itself compares neither the weights nor, on a CPU, the size of blocks.
    """
    cache, model = config.cache_config, config.model_config
    tensor, positions, pipeline = ranks_of(config)
    backend = getattr(config.attention_config.backend, "name", "auto")
    # vLLM connects workers only whose models have the same path.
    path = blake3(str(model.model).encode()).hexdigest()[:8]
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"vllm-{version}/block-{cache.block_size}/{dtype}/{cache.cache_dtype}/{backend}/"
        f"tp-{tensor}/dcp-{positions}/pp-{pipeline}/path-{path}/{_TICKETS}"
    )
