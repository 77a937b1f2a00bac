"""Admin operations: who may use them, and what they do."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from inlay.api import build_app
from inlay.base.errors import OverloadedError
from inlay.http import App
from inlay.http.serve import serve
from inlay.http.settings import FrontendSettings
from tests.live import SECRET, Fleet
from tests.payloads import error, post

TEXT = (
    "the lighthouse keeper counted the ships that passed along the coast before the storm came in"
)
RESET = "/reset_prefix_cache"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def cached(url: str, **headers: str) -> int:
    answer = post(url, "/v1/completions", {"prompt": TEXT, "max_tokens": 1}, **headers)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def two_ports(llama: Fleet, **settings: Any) -> tuple[str, str]:
    """(the base URL, the admin port's) of a new frontend."""

    async def start() -> tuple[str, str]:
        frontend = FrontendSettings(port=0, admin_port=0, **settings)
        app: App = build_app(llama.router, frontend, secret=SECRET)
        urls = [llama.loop.create_future(), llama.loop.create_future()]
        llama._serving.append(
            llama.loop.create_task(
                serve(
                    app,
                    frontend,
                    on_started=urls[0].set_result,
                    on_admin_started=urls[1].set_result,
                    stop=llama._stop,
                )
            )
        )
        llama.apps[await urls[0]] = app
        return await urls[0], await urls[1]

    return llama.run(start())


def test_without_keys_and_admin_port_nobody_is_an_admin_and_is_told_how_to_be(
    plain_url: str,
) -> None:
    refused = httpx.post(plain_url + RESET)
    assert refused.status_code == 403
    found = error(refused)
    assert found["type"] == "permission_error"
    for way in ("--admin-port", "--admin-api-key", "--api-key-file"):
        assert way in found["message"]


def test_it_takes_an_admin_key(llama: Fleet) -> None:
    url = llama.serve(api_key=["plain"], admin_api_key=["chief"])
    assert httpx.post(url + RESET).status_code == 401
    assert httpx.post(url + RESET, headers=bearer("wrong")).status_code == 401
    refused = httpx.post(url + RESET, headers=bearer("plain"))
    assert (refused.status_code, "admin key" in error(refused)["message"]) == (403, True)
    assert httpx.post(url + RESET, headers=bearer("chief")).status_code == 200
    # It may ask as others do.
    assert httpx.get(url + "/v1/models", headers=bearer("chief")).status_code == 200


def test_a_key_file_may_make_admins(llama: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: a, key: plain}\n- {name: b, key: chief, admin: true}\n")
    path.chmod(0o600)
    url = llama.serve(api_key_file=path)
    statuses = [
        httpx.post(url + RESET, headers=bearer(key)).status_code for key in ("plain", "chief")
    ]
    assert statuses == [403, 200]


def test_a_reset_makes_every_worker_forget_what_it_has_cached(llama: Fleet) -> None:
    url, admin = two_ports(llama)
    cached(url)
    assert cached(url) > 0
    answer = httpx.post(admin + RESET)
    assert answer.status_code == 200
    (worker,) = answer.json()["workers"]
    assert (worker["id"], worker["model"]) == ("local-0", "tiny")
    assert worker["blocks"] >= 1
    assert cached(url) == 0


def test_the_admin_port_needs_no_key_for_admin_operations_and_one_for_all_others(
    llama: Fleet,
) -> None:
    url, admin = two_ports(llama, api_key=["plain"])
    assert httpx.post(admin + RESET).status_code == 200
    assert httpx.get(admin + "/metrics").status_code == 200
    assert httpx.get(admin + "/v1/models").status_code == 401
    assert httpx.post(url + RESET).status_code == 401
    assert httpx.post(url + RESET, headers=bearer("plain")).status_code == 403


def test_without_keys_whoever_asks_at_the_other_port_is_told_of_the_admin_port(
    llama: Fleet,
) -> None:
    url, _ = two_ports(llama)
    refused = httpx.post(url + RESET)
    assert (refused.status_code, "at the server's admin port" in error(refused)["message"]) == (
        403,
        True,
    )


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}],
)
def test_a_web_page_may_not_use_the_admin_port(llama: Fleet, headers: dict[str, str]) -> None:
    _, admin = two_ports(llama, allowed_origins=["*"])
    refused = httpx.post(admin + RESET, headers=headers)
    assert (refused.status_code, "web pages" in error(refused)["message"]) == (403, True)


def test_metrics_may_be_for_admins_only(llama: Fleet) -> None:
    url, admin = two_ports(llama, metrics_public=False, admin_api_key=["chief"])
    assert httpx.get(url + "/metrics").status_code == 401
    assert httpx.get(url + "/metrics", headers=bearer("chief")).status_code == 200
    assert httpx.get(admin + "/metrics").status_code == 200
    assert httpx.get(llama.serve(metrics_public=False) + "/metrics").status_code == 403


def test_an_admin_is_served_when_the_server_is_full_and_by_get_is_told_what_to_use(
    llama: Fleet,
) -> None:
    url, admin = two_ports(llama, max_inflight_requests=1)
    with llama.apps[url].server.inflight:
        assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 503
        assert httpx.post(admin + RESET).status_code == 200
    assert httpx.get(admin + RESET).status_code == 405


def test_a_worker_that_fails_is_an_error_that_names_it(
    llama: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, admin = two_ports(llama)
    (worker,) = llama.plane.workers()
    original = worker.call

    async def failing(command: Any, within: float = 30.0) -> Any:
        await original(command, within)
        raise OverloadedError("it has had enough", retry_after=7)

    monkeypatch.setattr(worker, "call", failing)
    refused = httpx.post(admin + RESET)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
    assert (
        error(refused)["message"]
        == "reset_prefix_cache failed on 1 of 1 workers: local-0: it has had enough"
    )


def test_an_admin_operation_is_described_as_one(url: str) -> None:
    paths = httpx.get(url + "/openapi.json").json()["paths"]
    assert paths[RESET]["post"]["tags"] == ["admin"]
    assert "security" in paths[RESET]["post"]
    assert "tags" not in paths["/v1/completions"]["post"]
