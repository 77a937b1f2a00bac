"""SGLang's arguments and fields for a worker of a role."""

from typing import Any

import pytest
from msgspec.structs import replace

from inlay import engine as engines
from inlay.base.address import KvRoom
from inlay.base.errors import KV_LOST, EngineError, InvalidRequestError, OverloadedError
from inlay.cli.serve import _check as check_served
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang.request_tracker import SglangRequestTracker
from inlay.engine.sglang.rooms import FAKE_HOST, checked, words
from inlay.http.settings import FrontendSettings
from inlay.messages.card import ModelCard
from inlay.messages.priority import FIRST
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, Request, Sampling
from tests.router.standing import CARD

ROOM = KvRoom("10.0.0.1", 8998, 7)
PREFILL = replace(CARD, phase="prefill", kv_rooms="f", bootstrap=("10.0.0.1", 8998))
DECODE = replace(CARD, phase="decode", kv_rooms="f")


def settings(*after: str, **changes: Any) -> EngineSettings:
    given = {"device": "cuda", **changes}
    return EngineSettings.of(model="m", engine="sglang", engine_arguments=list(after), **given)


def request(room: KvRoom | None = ROOM, **fields: Any) -> Request:
    prompts = (Prompt.of(Tokens([1, 2])),)
    return Request(id="r", prompts=prompts, params=Sampling(max_tokens=2), kv_room=room, **fields)


@pytest.mark.parametrize(
    ("after", "changes", "message"),
    [
        (["--disaggregation-mode", "prefill"], {}, "say --role"),
        (["--disaggregation-mode=decode"], {"role": "decode"}, "say --role"),
        (["--disaggregation-transfer-backend", "fake"], {"role": "decode"}, "moves no keys"),
        (["--disaggregation-transfer-backend=fake"], {"role": "decode"}, "moves no keys"),
        (["--enable-pd-role-switch"], {"role": "prefill"}, "routers take for fixed"),
        ([], {"role": "prefill", "task": "embed"}, "models that generate"),
    ],
)
def test_what_would_be_half_a_pair_only_by_half_is_refused(
    after: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        engines.check(settings(*after, **changes))
    assert "\n" not in refused.value.message


def test_a_role_is_sglangs_mode_and_what_is_given_stays() -> None:
    assert list(words(settings(), "127.0.0.1")) == []
    engines.check(settings(role="decode", enable_prefix_caching=False))
    decode = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"]
    assert list(words(settings(role="decode"), "127.0.0.1")) == decode
    backend = ("--disaggregation-transfer-backend", "mooncake")
    assert list(words(settings(*backend, role="decode"), "127.0.0.1")) == decode[:2]
    found = list(words(settings(role="prefill"), "127.0.0.1"))
    assert found[4:7] == ["--host", "127.0.0.1", "--disaggregation-bootstrap-port"]
    assert 20000 <= int(found[7]) <= 29999
    given = ("--disaggregation-bootstrap-port=8998", "--host", "10.0.0.1")
    assert list(words(settings(*given, role="prefill"), "127.0.0.1"))[4:] == []
    # On a CPU SGLang's defaults ask for a GPU.
    on_cpu = list(words(settings(role="decode", device="cpu"), "127.0.0.1"))
    assert on_cpu[4:] == [
        "--disable-overlap-schedule",
        "--disaggregation-decode-retraction-backup",
        "cpu_tensor",
    ]


def test_the_address_of_a_role_is_that_by_which_others_reach_the_machine() -> None:
    assert "SGLANG_HOST_IP" not in engines.environment(settings(), {}, "127.0.0.9")
    found = engines.environment(settings(role="decode"), {}, "127.0.0.9")
    assert found["SGLANG_HOST_IP"] == "127.0.0.9"
    given = {"SGLANG_HOST_IP": "10.0.0.1"}
    assert "SGLANG_HOST_IP" not in engines.environment(settings(role="decode"), given, "localhost")


@pytest.mark.parametrize("card", [PREFILL, DECODE])
def test_a_room_goes_to_sglang_as_its_own_fields(card: ModelCard) -> None:
    assert checked(request(), card) == {
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": 7,
    }
    probe = request(None, priority=FIRST)
    assert checked(probe, card) == {"bootstrap_host": FAKE_HOST, "bootstrap_room": 0}
    assert checked(request(), CARD) == {}


@pytest.mark.parametrize(
    "room",
    [
        None,
        replace(ROOM, host=FAKE_HOST),
        replace(ROOM, number=0),
        replace(ROOM, number=-1),
        replace(ROOM, number=2**63),
        replace(ROOM, port=0),
        replace(ROOM, port=65536),
    ],
)
def test_what_names_no_room_is_refused_by_either_half(room: KvRoom | None) -> None:
    for card in (PREFILL, DECODE):
        with pytest.raises(OverloadedError, match="names no room"):
            checked(request(room), card)


def test_a_prefill_worker_keeps_to_its_own_address() -> None:
    for room in (replace(ROOM, host="10.0.0.2"), replace(ROOM, port=8999)):
        assert checked(request(room), DECODE)
        with pytest.raises(OverloadedError, match="names no room"):
            checked(request(room), PREFILL)


@pytest.mark.parametrize("room", [ROOM, None])
async def test_an_end_before_the_first_token_of_a_room_is_no_fault_of_the_engine(
    room: KvRoom | None,
) -> None:
    said = {
        "output_ids": [],
        "meta_info": {
            "output_token_logprobs": [],
            "finish_reason": {"type": "abort", "message": "KVTransferError"},
        },
    }
    outputs: list[Output] = []
    tracker = SglangRequestTracker(request(room), outputs.append, "id", ())
    assert tracker.take(said)
    (last,) = outputs
    assert last.error is not None
    error = last.error.to_error()
    assert "KVTransferError" in error.message
    assert isinstance(error, EngineError if room is None else OverloadedError)
    assert error.reason == (None if room is None else KV_LOST)


def test_a_server_of_its_own_is_no_half() -> None:
    with pytest.raises(InvalidRequestError, match=r"--role decode with SGLang is for workers"):
        check_served([settings(role="decode")], FrontendSettings(port=0))
