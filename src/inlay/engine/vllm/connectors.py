"""`--connector`: short names for what vLLM's `--kv-transfer-config` says at length.

The mapping is that of Dynamo's vLLM worker: https://github.com/ai-dynamo/dynamo,
`components/src/dynamo/vllm/args.py`.
"""

import json
from collections.abc import Sequence
from typing import Any

from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError

CONNECTORS: dict[str, dict[str, Any]] = {
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
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


def transfer_config(settings: EngineSettings) -> dict[str, Any] | None:
    """VLLM's KV transfer configuration, or None for none.

    Raises:
        InvalidRequestError: it is said twice, is not a JSON object, or names connectors that do not
            go together.
    """
    names = settings.connector
    if settings.kv_transfer_config is not None:
        if names:
            raise InvalidRequestError(
                "--connector is short for --kv-transfer-config: give one of them", param="connector"
            )
        try:
            given = json.loads(settings.kv_transfer_config)
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
        "kv_connector_extra_config": {"connectors": [CONNECTORS[name] for name in several]},
    }


__all__ = ["CONNECTORS", "expanded", "transfer_config"]
