"""Limits over HTTP: who is turned away, with what, and that the same request is taken a moment later."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from inlay.api.generation.logprobs import BYTES
from inlay.api.openai.completions.shape import CompletionShape
from inlay.base.errors import EmbeddingsError
from inlay.http.bodies.accounting import ByteBudget, EmbedsLimits
from inlay.http.settings import FrontendSettings
from inlay.messages.card import Limits, ModelCard
from inlay.tensors import write
from inlay.tensors.tensor import check_size
from tests.live import Fleet, fleet, until
from tests.models import tiny
from tests.payloads import HIDDEN, b64, constant, error, post

SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
MIB = 1024 * 1024


def ask(url: str, key: str | None = None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(
        url + "/v1/completions", json={**SHORT, **fields}, headers=headers, timeout=180
    )


@contextmanager
def unfinished(url: str, length: int, more: str = "") -> Iterator[socket.socket]:
    """A request whose body does not come."""
    parts = urlsplit(url)
    with socket.create_connection(
        (parts.hostname or "", parts.port or 0), timeout=30
    ) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{more}\r\n"
        connection.sendall(head.encode() + b"{")
        yield connection


def answer_on(connection: socket.socket) -> bytes:
    """A whole error answer."""
    answer = b""
    while not answer.endswith(b"}}"):
        piece = connection.recv(4096)
        assert piece, answer
        answer += piece
    return answer


def key_file(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(entries))
    path.chmod(0o600)
    return path


def test_one_over_its_rate_is_told_when_to_come_back(llama: Fleet, tmp_path: Path) -> None:
    keys = key_file(
        tmp_path / "keys.json",
        [{"name": "slow", "key": "one", "rate": 2}, {"name": "fast", "key": "two"}],
    )
    url = llama.serve(api_key_file=keys)
    assert [ask(url, "one").status_code for _ in range(2)] == [200, 200]
    refused = ask(url, "one")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
    found = error(refused)
    assert (found["type"], found["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests a minute" in found["message"]
    assert ask(url, "two").status_code == 200
    # What costs nothing is not counted.
    assert httpx.get(url + "/v1/models", headers={"authorization": "Bearer one"}).status_code == 200


def test_the_rate_of_the_settings_is_the_addresses_where_no_key_is_asked_for(llama: Fleet) -> None:
    url = llama.serve(max_client_rate=1)
    assert [ask(url).status_code for _ in range(2)] == [200, 429]


def test_a_rate_is_told_before_the_body_is_read(llama: Fleet) -> None:
    url = llama.serve(max_client_rate=1)
    assert ask(url).status_code == 200
    with unfinished(url, 50 * MIB) as connection:
        assert answer_on(connection).startswith(b"HTTP/1.1 429")


def test_a_client_at_its_share_of_requests_does_not_hold_up_another(
    llama: Fleet, tmp_path: Path
) -> None:
    keys = key_file(tmp_path / "k.json", [{"name": "a", "key": "one"}, {"name": "b", "key": "two"}])
    url = llama.serve(api_key_file=keys, max_inflight_requests=4)
    inflight = llama.apps[url].server.inflight
    header = "authorization: Bearer one\r\n"
    with unfinished(url, 100, header), unfinished(url, 100, header):
        until(lambda: inflight.count == 2)
        refused = ask(url, "one")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "your share" in error(refused)["message"]
        assert ask(url, "two").status_code == 200
    until(lambda: not inflight.count)
    assert ask(url, "one").status_code == 200
    until(lambda: not len(llama.apps[url].server.clients))


def test_a_client_at_its_share_of_bytes_is_told_before_its_body_is_read(
    llama: Fleet, tmp_path: Path
) -> None:
    keys = key_file(
        tmp_path / "k.json",
        [{"name": "a", "key": "one", "max_bytes": 3 * MIB}, {"name": "b", "key": "two"}],
    )
    url = llama.serve(api_key_file=keys)
    server = llama.apps[url].server
    with unfinished(url, 2 * MIB, "authorization: Bearer one\r\n"):
        until(lambda: server.budget.used == 2 * MIB)
        with unfinished(url, 2 * MIB, "authorization: Bearer one\r\n") as second:
            answer = answer_on(second)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1\r\n" in answer
        with unfinished(url, 4 * MIB, "authorization: Bearer one\r\n") as third:
            assert answer_on(third).startswith(b"HTTP/1.1 413")
        with unfinished(url, 2 * MIB, "authorization: Bearer two\r\n"):
            until(lambda: server.budget.used == 4 * MIB)
    until(lambda: server.budget.used == 0)


class Recording(ByteBudget):
    """A budget that remembers every amount it held."""

    def __init__(self, limit: int) -> None:
        self.seen: list[int] = []
        super().__init__(limit)

    @property
    def used(self) -> int:
        return self.seen[-1]

    @used.setter
    def used(self, value: int) -> None:
        self.seen.append(value)


def test_the_budget_counts_what_a_body_decodes_to_and_is_cast_to() -> None:
    with fleet(tiny("llama"), engine="echo", max_model_len=8192) as running:
        url = running.serve(enable_prompt_embeds=True)
        budget = running.apps[url].server.budget = Recording(64 * MIB)
        rows = np.full((4000, HIDDEN), 0.5, np.float16)
        data = write(rows, "safetensors")
        body = json.dumps({"prompt_embeds": b64(data), "max_tokens": 1}).encode()
        answer = httpx.post(
            url + "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
        until(lambda: budget.used == 0)
    # The body, decoded as it comes; what it decodes to; the rows beside the file; the rows alone.
    cast, most = 2 * rows.nbytes, 4096
    expected = [len(body), len(data), len(data) + cast, cast, 0]
    steps = iter(budget.seen[1:])
    for size in expected:
        assert any(size <= step <= size + most for step in steps), (size, budget.seen)


def test_logprobs_kept_for_a_whole_answer_are_counted_and_bounded(llama: Fleet) -> None:
    url = llama.serve(max_inflight_bytes=8 * MIB)
    server = llama.apps[url].server
    body = {"prompt": "a", "n": 4, "max_tokens": 20, "logprobs": 20, "ignore_eos": True}
    kept = 4 * 20 * 21 * BYTES
    budget = server.budget = Recording(8 * MIB)
    assert httpx.post(url + "/v1/completions", json=body, timeout=180).status_code == 200
    assert kept <= max(budget.seen) < 1.5 * kept
    with httpx.stream(
        "POST", url + "/v1/completions", json={**body, "stream": True}, timeout=180
    ) as events:
        budget.seen[:] = budget.seen[-1:]
        assert "[DONE]" in list(events.iter_lines())[-2]
    assert max(budget.seen) < kept / 10
    until(lambda: budget.used == 0)
    refused = httpx.post(url + "/v1/completions", json={**body, "max_tokens": 400}, timeout=180)
    assert refused.status_code == 413
    assert "one client may hold" in refused.json()["error"]["message"]
    until(lambda: budget.used == 0)


def test_a_long_answer_is_put_together_off_the_event_loop(
    llama: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    made = CompletionShape.response

    def response(shape: CompletionShape) -> Any:
        threads.append(threading.current_thread())
        return made(shape)

    monkeypatch.setattr(CompletionShape, "response", response)
    url = llama.serve()
    for logprobs in (None, 20):
        body = {"prompt": "a", "n": 4, "max_tokens": 30, "logprobs": logprobs, "ignore_eos": True}
        assert httpx.post(url + "/v1/completions", json=body, timeout=180).status_code == 200
    loop = llama.run(_current_thread())
    assert threads[0] is loop
    assert threads[1] is not loop


async def _current_thread() -> threading.Thread:
    return threading.current_thread()


def test_a_body_that_would_be_too_much_parsed_is_refused_before_it_is(llama: Fleet) -> None:
    url = llama.serve(max_inflight_bytes=8 * MIB)
    # Each of these takes 32 times what it is written with.
    body = b'{"prompt": [' + b"1," * 300_000 + b"1]}"
    refused = httpx.post(
        url + "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert (refused.status_code, "decodes to" in error(refused)["message"]) == (413, True)
    assert ask(url).status_code == 200


def card(max_model_len: int) -> ModelCard:
    limits = Limits(max_model_len=max_model_len, max_num_seqs=1)
    return ModelCard(
        name="m",
        path="",
        weights_id="",
        dtype="bfloat16",
        vocab_size=9,
        hidden_size=1536,
        limits=limits,
        engine="torch",
        engine_version="",
    )


def test_an_upload_before_any_model_is_known_may_be_of_10_mb() -> None:
    assert EmbedsLimits(FrontendSettings(), list).any.max_bytes == 10 * MIB
    small = FrontendSettings(max_inflight_bytes=4 * MIB, max_body_bytes=MIB)
    assert EmbedsLimits(small, list).any.max_bytes == MIB


@pytest.mark.parametrize(
    ("context", "fields", "size", "flag"),
    [
        (8192, {}, 8192 * 1536 * 4 + 64 * 1024, "--max-prompt-embeds-bytes"),
        (8192, {"max_prompt_embeds_bytes": "auto"}, 8192 * 1536 * 4 + 64 * 1024, "--max-prompt-"),
        (512, {}, 10 * MIB, "--max-prompt-embeds-bytes"),
        (8192, {"max_prompt_embeds_bytes": 500}, 500, "--max-prompt-embeds-bytes"),
        (32768, {}, 64 * MIB, "--max-request-embeds-bytes"),
        (32768, {"max_request_embeds_bytes": 256 * MIB}, 64 * MIB, "--max-body-bytes"),
        (32768, {"max_inflight_bytes": 9 * MIB}, 9 * MIB, "--max-inflight-bytes"),
        (32768, {"max_client_bytes": 8 * MIB}, 8 * MIB, "--max-client-bytes"),
    ],
)
def test_by_default_a_prompt_may_be_the_whole_context_within_the_budget(
    context: int, fields: dict[str, Any], size: int, flag: str
) -> None:
    served = card(context)
    limits = EmbedsLimits(FrontendSettings(**fields), lambda: [card(16), served])
    for found in (limits.of(served), limits.any):
        assert found.max_bytes == size
        assert found.flag.startswith(flag)
        with pytest.raises(EmbeddingsError, match=rf"exceeds maximum size of .*\({flag}"):
            check_size(size + 1, limits=found)


def test_a_prompt_of_the_whole_context_is_taken_and_a_longer_one_told_so(llama: Fleet) -> None:
    url = llama.serve(enable_prompt_embeds=True)
    limits = httpx.get(url + "/v1/models").json()["data"][0]["limits"]
    assert limits["max_prompt_embeds_bytes"] == 10 * MIB
    assert ask(url, prompt_embeds=constant(0.5, rows=500)).status_code == 200
    longer = error(ask(url, prompt_embeds=constant(0.5, rows=600)))["message"]
    assert "maximum context length is 512" in longer
    assert "(--max-model-len)" in longer


def test_a_limit_that_refuses_names_its_flag_and_what_is_allowed(llama: Fleet) -> None:
    url = llama.serve(
        enable_prompt_embeds=True,
        max_prompt_embeds_bytes=4000,
        max_prompt_embeds_parts=2,
        max_request_embeds_bytes=5000,
        max_body_bytes=20_000,
        max_json_bytes=12_000,
        max_choices=2,
    )
    for fields, status, *said in (
        (
            {"prompt_embeds": constant(0.5, rows=25)},
            400,
            "4000 bytes: got 4888",
            "-prompt-embeds-bytes",
        ),
        ({"prompt_embeds": [constant(0.5)] * 3}, 400, "at most 2", "--max-prompt-embeds-parts"),
        (
            {"prompt_embeds": [constant(0.5, rows=15)] * 2},
            413,
            "5000",
            "--max-request-embeds-bytes",
        ),
        ({"prompt": "a" * 30_000}, 413, "20000 bytes", "--max-body-bytes"),
        ({"prompt": "a" * 15_000}, 413, "12000 bytes", "--max-json-bytes"),
        ({"n": 3}, 400, "at most 2", "--max-choices"),
    ):
        refused = ask(url, **fields)
        message = error(refused)["message"]
        assert (refused.status_code, message) == (status, message)
        assert all(phrase in message for phrase in said), message


def test_the_embeds_of_a_request_have_a_number_and_a_sum(llama: Fleet) -> None:
    url = llama.serve(
        enable_prompt_embeds=True, max_prompt_embeds_parts=3, max_request_embeds_bytes=100_000
    )
    assert ask(url, prompt_embeds=[constant(0.5)] * 3).status_code == 200
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    embeds = {"type": "prompt_embeds", "data": constant(0.5)}
    for content, said in (
        ([picture] * 4, "has 4 images; at most 3 are allowed"),
        ([embeds, *[picture] * 3], "1 prompt_embeds and 3 images; together at most 3 are allowed"),
    ):
        body = {"messages": [{"role": "user", "content": content}]}
        found = error(post(url, "/v1/chat/completions", body))
        assert said in found["message"]
        assert found["param"].startswith("messages[0].content[3]")
    refused = ask(url, prompt_embeds=[constant(0.5)] * 4)
    assert (refused.status_code, "has 4 prompt_embeds; at most 3" in error(refused)["message"]) == (
        400,
        True,
    )
    parts = [{"type": "prompt_embeds", "data": constant(0.5)}] * 4
    chat = post(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert (chat.status_code, "at most 3" in error(chat)["message"]) == (400, True)
    for rows in (200, 400):
        large = ask(url, prompt_embeds=[constant(0.5, rows=rows)] * 3)
        assert (large.status_code, "at most 100000" in error(large)["message"]) == (413, True)


def test_a_batch_may_have_as_many_prompts_as_a_request_choices(llama: Fleet) -> None:
    url = llama.serve(enable_prompt_embeds=True, max_choices=2)
    batch = b64(write(np.full((3, 4, HIDDEN), 0.5, np.float32), "npy"))
    refused = ask(url, prompt_embeds=batch)
    assert (refused.status_code, "at most 2" in error(refused)["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_504_and_so_does_its_request(
    llama: Fleet, stream: bool
) -> None:
    url = llama.serve(request_timeout=0.25)
    answer = ask(url, **LONG, n=64, stream=stream)
    if stream and answer.status_code == 200:
        events = answer.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
    else:
        assert (answer.status_code, error(answer)["type"]) == (504, "timeout_error")
        assert "0.25 s" in error(answer)["message"]
    until(lambda: not llama.running())
    assert ask(url).status_code == 200


@pytest.mark.thorough
def test_a_queued_request_ends_in_time_too() -> None:
    with fleet(tiny("llama"), max_num_seqs=1) as running:
        url = running.serve(max_client_requests=100)
        first = threading.Thread(target=ask, args=(url,), kwargs={**LONG, "n": 2})
        first.start()
        until(lambda: running.running() > 1)
        answer = httpx.post(
            url + "/v1/completions", json=LONG, headers={"x-request-timeout": "0.2"}
        )
        assert answer.status_code == 504
        first.join()


def test_a_client_may_ask_for_less_time_and_not_for_more(llama: Fleet) -> None:
    url = llama.serve(request_timeout=0.3)
    with unfinished(url, 100, "x-request-timeout: 3600\r\n") as connection:
        assert answer_on(connection).startswith(b"HTTP/1.1 504")
    plain = llama.serve()
    with unfinished(plain, 100, "x-request-timeout: 0.1\r\n") as connection:
        answer = answer_on(connection)
    assert answer.startswith(b"HTTP/1.1 504")
    assert b"longer than its 0.1 s" in answer


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_timeout_that_is_none_is_refused(plain_url: str, value: str) -> None:
    refused = httpx.post(
        plain_url + "/v1/completions", json=SHORT, headers={"x-request-timeout": value}
    )
    assert (refused.status_code, error(refused)["param"]) == (400, "X-Request-Timeout")


def test_new_keys_are_taken_and_old_ones_are_not_while_the_server_runs(
    llama: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path / "keys.json", [{"name": "a", "key": "one"}])
    url = llama.serve(api_key_file=path)
    assert [ask(url, key).status_code for key in ("one", "two", None)] == [200, 401, 401]
    key_file(path, [{"name": "a", "key": "two"}])
    until(lambda: ask(url, "two").status_code == 200)
    assert ask(url, "one").status_code == 401
    path.write_text("{")
    until(lambda: "the API keys were not reloaded" in caplog.text)
    assert ask(url, "two").status_code == 200


def test_a_rotated_key_finds_what_its_tenant_has_cached(llama: Fleet, tmp_path: Path) -> None:
    text = "the lighthouse keeper counted the ships that passed along the coast before the storm came in"
    names = [("a", "one"), ("a", "two"), ("b", "three")]
    path = key_file(tmp_path / "keys.json", [{"name": name, "key": key} for name, key in names])
    url = llama.serve(api_key_file=path)

    def cached(key: str) -> int:
        usage = ask(url, key, prompt=text).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("two") > 0
    assert cached("three") == 0
