"""Sleep and wake through the admin routes, and what requests meet meanwhile."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from inlay.api import build_app
from inlay.base.errors import EngineError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http.settings import FrontendSettings
from inlay.router import Router
from tests.live import SECRET, Fleet, fleet, until
from tests.models import tiny
from tests.payloads import error, post
from tests.transport.direct import DirectPlane

ASKED: dict[str, Any] = {
    "prompt": "the lighthouse keeper counted",
    "max_tokens": 12,
    "temperature": 0,
}
CHIEF = {"authorization": "Bearer chief"}


@pytest.fixture(scope="module")
def sleeper() -> Iterator[Fleet]:
    with fleet(tiny("llama"), enable_sleep_mode=True) as running:
        yield running


@pytest.fixture(scope="module")
def url(sleeper: Fleet) -> str:
    return sleeper.serve(admin_api_key=["chief"])


@pytest.fixture(scope="module")
def patient_url(sleeper: Fleet) -> str:
    return sleeper.serve(admin_api_key=["chief"], asleep_requests="wait")


def tell(url: str, path: str, method: str = "POST") -> httpx.Response:
    return httpx.request(method, url + path, headers=CHIEF, timeout=180)


def ask(url: str, **fields: Any) -> httpx.Response:
    return post(url, "/v1/completions", {**ASKED, **fields}, **CHIEF)


def sleeping(url: str) -> bool:
    return bool(tell(url, "/is_sleeping", "GET").json()["is_sleeping"])


def test_an_order_names_a_worker_that_is_there(url: str) -> None:
    (worker,) = tell(url, "/workers", "GET").json()["data"]
    assert tell(url, f"/is_sleeping?worker={worker['id']}", "GET").json() == {
        "is_sleeping": False,
        "workers": [{"id": worker["id"], "model": "tiny", "level": 0}],
    }
    for path in ("/sleep", "/wake_up", "/drain"):
        unknown = tell(url, f"{path}?worker=nobody")
        assert unknown.status_code == 404
        assert error(unknown)["message"] == f"no worker 'nobody' is ready; ready: {worker['id']}"
    both = tell(url, f"/sleep?model=tiny&worker={worker['id']}")
    assert (both.status_code, error(both)["param"]) == (400, "worker")
    assert "name the worker" in error(tell(url, "/drain"))["message"]
    alone = tell(url, f"/drain?worker={worker['id']}")
    assert alone.status_code == 400
    assert "drains when the server is stopped" in error(alone)["message"]


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_sleeps_takes_nothing_and_answers_the_same_after_waking(
    url: str, level: int
) -> None:
    before = ask(url).json()["choices"]
    asleep = tell(url, f"/sleep?level={level}")
    assert asleep.status_code == 200
    body = asleep.json()
    assert (body["status"], body["level"]) == ("sleeping", level)
    assert [(worker["status"], worker["level"]) for worker in body["workers"]] == [(200, level)]
    assert sleeping(url)
    refused = ask(url)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "asleep" in error(refused)["message"]
    assert httpx.get(url + "/ready").status_code == 503
    assert httpx.get(url + "/live").status_code == 200
    assert httpx.get(url + "/v1/models", headers=CHIEF).json()["data"][0]["id"] == "tiny"
    awake = tell(url, "/wake_up")
    assert (awake.status_code, awake.json()["status"], awake.json()["tags"]) == (200, "awake", None)
    assert not sleeping(url)
    assert httpx.get(url + "/ready").status_code == 200
    assert ask(url).json()["choices"] == before


@pytest.mark.parametrize(
    "last", ["tags=kv_cache", "tags=weights,kv_cache", "tags=weights&tags=kv_cache"]
)
def test_a_worker_that_is_half_awake_takes_nothing(url: str, last: str) -> None:
    tell(url, "/sleep")
    half = tell(url, "/wake_up?tags=weights").json()
    assert (half["status"], half["tags"]) == ("sleeping", ["weights"])
    assert sleeping(url)
    assert ask(url).status_code == 503
    assert tell(url, f"/wake_up?{last}").json()["status"] == "awake"
    assert ask(url).status_code == 200


def test_requests_wait_for_a_model_that_sleeps_where_they_are_to(
    url: str, patient_url: str
) -> None:
    before = ask(url).json()["choices"]
    tell(url, "/sleep")
    found: list[httpx.Response] = []
    waiting = [threading.Thread(target=lambda: found.append(ask(patient_url))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    late = httpx.post(
        patient_url + "/v1/completions",
        json={"model": "tiny", **ASKED},
        headers={**CHIEF, "x-request-timeout": "0.2"},
    )
    assert late.status_code == 504
    assert not found
    tell(url, "/wake_up")
    for thread in waiting:
        thread.join()
    assert [(answer.status_code, answer.json()["choices"]) for answer in found] == [
        (200, before)
    ] * 3


def test_requests_are_waited_for_when_asked_to_be(sleeper: Fleet, url: str) -> None:
    found: list[httpx.Response] = []
    running = threading.Thread(
        target=lambda: found.append(ask(url, max_tokens=250, n=16, ignore_eos=True))
    )
    running.start()
    until(lambda: sleeper.running() > 0)
    assert tell(url, "/sleep?mode=wait&wait=60").status_code == 200
    running.join()
    assert found[0].status_code == 200
    assert found[0].json()["usage"]["completion_tokens"] == 16 * 250
    tell(url, "/wake_up")


@pytest.mark.parametrize("query", ["", "?mode=wait&wait=0.01"])
def test_requests_that_are_not_waited_for_are_aborted(sleeper: Fleet, url: str, query: str) -> None:
    found: list[httpx.Response] = []
    running = threading.Thread(
        target=lambda: found.append(ask(url, max_tokens=490, n=64, ignore_eos=True))
    )
    running.start()
    until(lambda: sleeper.running() > 0)
    assert tell(url, "/sleep" + query).status_code == 200
    running.join()
    assert found[0].status_code == 503
    tell(url, "/wake_up")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/sleep?level=0", "level must be 1 or 2"),
        ("/sleep?level=3", "level must be 1 or 2"),
        ("/sleep?level=x", "level must be 1 or 2"),
        ("/sleep?level=99999999999999999999", "level must be 1 or 2"),
        ("/sleep?wait=long", "wait must be"),
        ("/sleep?mode=keep", "mode must be abort or wait"),
        ("/sleep?wait=-1", "wait must be"),
        ("/sleep?wait=nan", "wait must be"),
        ("/wake_up?tags=scheduling", "tags must be weights or kv_cache"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nobody_falls_asleep(
    url: str, path: str, said: str
) -> None:
    refused = tell(url, path)
    assert (refused.status_code, said in error(refused)["message"]) == (400, True)
    assert not sleeping(url)


def test_waking_what_is_awake_and_sleeping_twice_are_fine(url: str) -> None:
    assert tell(url, "/wake_up").json()["status"] == "awake"
    assert tell(url, "/sleep").status_code == tell(url, "/sleep").status_code == 200
    assert tell(url, "/reset_prefix_cache").status_code >= 400
    assert tell(url, "/wake_up").json()["status"] == "awake"


def test_only_admins_may(url: str) -> None:
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert httpx.request(method, url + path).status_code == 401


def test_an_unknown_model_is_not_found_and_a_known_one_is(url: str) -> None:
    assert tell(url, "/sleep?model=other").status_code == 404
    assert tell(url, "/is_sleeping?model=org/tiny", "GET").json()["is_sleeping"] is False


def test_without_the_flag_nothing_sleeps_and_the_answer_says_how(llama: Fleet) -> None:
    plain = llama.serve(admin_api_key=["chief"])
    refused = tell(plain, "/sleep")
    assert (refused.status_code, "--enable-sleep-mode" in error(refused)["message"]) == (400, True)
    assert not sleeping(plain)


def test_caches_are_cleared_under_both_names(url: str) -> None:
    ask(url)
    for path in ("/reset_prefix_cache", "/clear_kv_blocks"):
        answer = tell(url, path).json()
        assert answer["success"] is True
        assert [worker["status"] for worker in answer["workers"]] == [200]


async def test_when_some_workers_follow_and_others_do_not_each_is_told_of(tmp_path: Path) -> None:
    class Broken(EchoEngine):
        async def reset_prefix_cache(self) -> int:
            raise EngineError("it is broken")

    (tmp_path / "config.json").write_text(
        '{"vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 64}'
    )
    settings = EngineSettings.of(model=str(tmp_path), engine="echo")
    plane = await DirectPlane.around(EchoEngine(settings, SECRET), Broken(settings, SECRET))
    app = build_app(
        Router(plane), FrontendSettings(admin_api_key=[SecretStr("chief")]), secret=SECRET
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://inlay") as client:
        answer = await client.post("/clear_kv_blocks", headers=CHIEF)
    assert (answer.status_code, answer.json()["success"]) == (207, False)
    assert [worker["status"] for worker in answer.json()["workers"]] == [200, 500]
    assert answer.json()["workers"][1]["error"]["message"] == "it is broken"
    await plane.close()
    app.server.close()
