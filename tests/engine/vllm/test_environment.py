"""Refused variables of a user's environment."""

import socket

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.environment import check, environment


def test_workers_of_pairs_listen_where_others_reach_them_and_not_twice_on_one_port() -> None:
    settings = EngineSettings.of(model="m", engine="vllm", role="prefill")
    found = environment(settings, {}, "127.0.0.1")
    assert found["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    with socket.create_server(("127.0.0.1", int(found["VLLM_NIXL_SIDE_CHANNEL_PORT"]))):
        pass
    users = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "h", "VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}
    assert not users.keys() & environment(settings, users, "127.0.0.1").keys()
    alone = EngineSettings.of(model="m", engine="vllm")
    assert not users.keys() & environment(alone, {}, "127.0.0.1").keys()


def test_batch_invariance_is_vllms_own_switch() -> None:
    for value, found in ((True, "1"), (False, None), (None, None)):
        settings = EngineSettings.of(model="m", engine="vllm", batch_invariant=value)
        assert environment(settings, {}, "127.0.0.1").get("VLLM_BATCH_INVARIANT") == found


def test_the_guard_against_nan_cannot_be_turned_off() -> None:
    for given in ({}, {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}):
        check(given)
    with pytest.raises(InvalidRequestError, match="VLLM_COMPUTE_NANS_IN_LOGITS=0 is set"):
        check({"VLLM_COMPUTE_NANS_IN_LOGITS": "0"})
