"""Configurations that `--connector` stands for, and those it refuses."""

import json
from typing import Any

import pytest

from inlay import engine
from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.connectors import gives_tickets, transfer_config


def settings(**options: Any) -> EngineSettings:
    return EngineSettings.of(model="m", **{"engine": "vllm", **options})


def test_one_connector_stands_for_its_own_configuration() -> None:
    assert transfer_config(settings()) is None
    assert transfer_config(settings(connector=["none"])) is None
    assert transfer_config(settings(connector=["nixl"])) == {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "inlay.engine.vllm.nixl",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 30},
    }


def test_a_role_stands_for_nixl_and_goes_with_no_other() -> None:
    for names in ([], ["nixl"]):
        found = transfer_config(settings(role="prefill", connector=names))
        assert found == transfer_config(settings(connector=["nixl"]))
        assert gives_tickets(found)
    for options in ({"connector": ["lmcache"]}, {"kv_transfer_config": "{}"}):
        assert not gives_tickets(transfer_config(settings(**options)))
        with pytest.raises(InvalidRequestError, match="--role decode needs --connector nixl"):
            transfer_config(settings(role="decode", **options))


@pytest.mark.parametrize(
    "names", [["kvbm", "nixl"], ["pd", "kvbm", "nixl"], ["kvbm", "nixl", "pd"]]
)
def test_a_cache_and_what_moves_blocks_are_joined(names: list[str]) -> None:
    found = transfer_config(settings(connector=names))
    assert found is not None
    assert (found["kv_connector"], found["kv_role"]) == ("PdConnector", "kv_both")
    inner = found["kv_connector_extra_config"]["connectors"]
    assert [each["kv_connector"] for each in inner] == ["DynamoConnector", "NixlConnector"]
    assert "kv_connector_module_path" not in inner[1]
    json.dumps(found)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["nixl", "nixl"], "twice"),
        (["none", "nixl"], "stands alone"),
        (["pd"], "pd joins connectors"),
        (["pd", "nixl"], "pd joins connectors"),
        (["nixl", "kvbm"], "a cache and then what moves blocks"),
        (["lmcache", "kvbm"], "a cache and then what moves blocks"),
        (["lmcache", "kvbm", "nixl"], "a cache and then what moves blocks"),
    ],
)
def test_connectors_that_do_not_go_together_are_refused_with_the_reason(
    names: list[str], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        transfer_config(settings(connector=names))


def test_vllms_own_json_is_passed_on_and_stands_alone() -> None:
    own = {"kv_connector": "Mine", "kv_role": "kv_producer"}
    assert transfer_config(settings(kv_transfer_config=json.dumps(own))) == own
    with pytest.raises(InvalidRequestError, match="give one of them"):
        transfer_config(settings(kv_transfer_config="{}", connector=["nixl"]))
    for wrong in ("{", "[]", "3"):
        with pytest.raises(InvalidRequestError, match="kv-transfer-config"):
            transfer_config(settings(kv_transfer_config=wrong))


@pytest.mark.parametrize(
    "options",
    [
        {"connector": ["nixl"]},
        {"kv_transfer_config": "{}"},
        {"engine_arguments": ["--quantization", "fp8"]},
    ],
)
def test_what_is_vllms_is_refused_by_other_engines(options: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequestError,
        match=r"is for the vllm (and sglang and vllm-omni )?engines?, not for torch",
    ):
        engine.check(settings(engine="torch", **options))
