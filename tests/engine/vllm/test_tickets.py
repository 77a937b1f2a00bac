"""Tickets for keys and values: made of what vLLM says, good for one prompt and one form."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.vllm.tickets import LEASE_SECONDS, TicketOffice
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling
from tests.router.standing import CARD

SECRET = Secret(bytes(range(32)))
FORM = replace(CARD, kv_layout="vllm-1/block-16", kv_tickets=True, num_blocks=64)
SAID: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 8, 9]],
    "remote_engine_id": "p",
    "remote_request_id": "r.0-abcdef01",
    "remote_host": "h",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": 130.5,
    "transfer_mode": "pull",
}


def office(
    engine_id: str = "d", *, secret: Secret = SECRET, now: float = 1000.0, **card: Any
) -> TicketOffice:
    return TicketOffice(secret, replace(FORM, **card), engine_id, (1, 1, 1), lambda: now)


def asked(count: int = 40, salt: str | None = None, first: int = 1, **more: Any) -> Request:
    prompt = Prompt.of(Tokens([first, *range(2, count + 1)]))
    return Request(
        id="r",
        prompts=(prompt,),
        params=Sampling(max_tokens=4),
        salt=salt,
        gives_ticket=True,
        **more,
    )


def ticket(request: Request, adapter: str | None = None, **said: Any) -> bytes:
    payload = office("p").payload(request, adapter, {**SAID, **said})
    return bytes(payload.data.view)


def test_vllm_is_told_what_the_other_said() -> None:
    opened = office().opened(ticket(asked()))
    assert office().refused(opened, asked(), None) is None
    told = opened.parameters((1, 1, 1))
    assert told == {key: SAID[key] for key in told}
    assert set(SAID) - set(told) == {"transfer_mode"}
    assert (office().is_own(opened), office("p").is_own(opened)) == (False, True)


@pytest.mark.parametrize(
    "said",
    [
        {"remote_block_ids": [[7, 8]]},
        {"remote_block_ids": [[7, 8, 64]]},
        {"remote_block_ids": [[7, 8, -1]]},
        {"remote_block_ids": [[7, 8, "9"]]},
        {"remote_block_ids": [[7, 8, 9], [1]]},
        {"remote_block_ids": []},
        {"remote_num_tokens": 39},
        {"remote_engine_id": "another"},
        {"remote_port": None},
        {"tp_size": 2},
    ],
)
def test_what_vllm_should_not_say_becomes_no_ticket(said: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"vLLM keeps|parameters of kept blocks are unknown"):
        ticket(asked(), **said)


def test_a_word_too_few_becomes_no_ticket() -> None:
    for name in ("remote_block_ids", "remote_host", "tp_size", "remote_blocks_expiry_time"):
        said = {key: value for key, value in SAID.items() if key != name}
        with pytest.raises(EngineError, match=name):
            office("p").payload(asked(), None, said)


def test_a_ticket_is_good_for_its_prompt_adapter_salt_and_form_alone() -> None:
    opened = office().opened(ticket(asked(salt="a"), "adapter"))
    assert office().refused(opened, asked(salt="a"), "adapter") is None
    for other, adapter in (
        (asked(salt="b"), "adapter"),
        (asked(), "adapter"),
        (asked(salt="a"), None),
        (asked(salt="a"), "another"),
        (asked(salt="a", first=9), "adapter"),
        (asked(41, salt="a"), "adapter"),
        (asked(salt="a", prior_output=(1,)), "adapter"),
    ):
        assert office().refused(opened, other, adapter) == "they are of another prompt"
    for layout in ("vllm-1/block-32", ""):
        refused = office(kv_layout=layout).refused(opened, asked(salt="a"), "adapter")
        assert refused is not None
        assert "of the form vllm-1/block-16" in refused
    for other_model in (office(weights_id="x"), office(dtype="bfloat16")):
        assert other_model.refused(opened, asked(salt="a"), "adapter") is not None


def test_a_ticket_for_too_few_blocks_is_not_used() -> None:
    """As if the prefill worker's own vLLM had kept too few: vLLM would end of it, or read on."""
    opened = office().opened(ticket(asked()))
    for ids in ((), opened.block_ids[:-1], (*opened.block_ids, 1)):
        refused = office().refused(replace(opened, block_ids=ids), asked(), None)
        assert refused == f"{len(ids)} blocks cannot be those of 40 positions"


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (1000.0, None),
        (1000.0 + LEASE_SECONDS / 2, None),
        (1000.1 + LEASE_SECONDS / 2, "they have been kept for 15 s, allowed are 15"),
        # The clocks of two machines differ; the lease's own clock is asked after the read.
        (900.0, None),
    ],
)
def test_a_ticket_is_good_for_half_a_lease_from_when_it_was_made(
    now: float, reason: str | None
) -> None:
    """Wherever it was meanwhile: a frontend may have kept it."""
    opened = office().opened(ticket(asked()))
    assert office(now=now).late(opened) == reason
    assert office(now=now).refused(opened, asked(), None) == reason


def test_nobody_without_the_secret_makes_or_changes_one() -> None:
    sealed = ticket(asked())
    stranger = office(secret=Secret(bytes(32)))
    own = bytes(stranger_payload(stranger))
    for wrong in (own, sealed[:-1], sealed + b"\0", b"", msgspec.msgpack.encode({})):
        with pytest.raises(InvalidRequestError, match="not made in this fleet"):
            office().opened(wrong)
    for at in range(len(sealed)):
        with pytest.raises(InvalidRequestError, match="not made in this fleet"):
            office().opened(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])


def stranger_payload(stranger: TicketOffice) -> memoryview:
    payload = stranger.payload(asked(), None, {**SAID, "remote_engine_id": "d"})
    return payload.data.view
