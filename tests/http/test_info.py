"""vLLM's `/load`, `/ping`, `/tokenizer_info` and `/server_info`: what they say, and to whom."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live import Fleet, fleet, until
from tests.models import tiny

TEMPLATE = "{{ messages }} the operator's own words"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A model whose files say where they once were."""
    path = Path(shutil.copytree(tiny("llama"), tmp_path_factory.mktemp("info") / "model"))
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {
        "vocab_file": "/home/somebody/vocab.json",
        "name_or_path": "/home/somebody/model",
        "mask_token": {"content": "<mask>", "lstrip": False},
    }
    file.write_text(json.dumps(config))
    with fleet(path, engine="echo") as running:
        yield running


def test_a_ping_is_answered_with_the_engines_health(model: Fleet) -> None:
    url = model.serve(api_key=["one"])
    for method in ("GET", "POST"):
        answer = httpx.request(method, url + "/ping")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_a_ping_takes_no_place_of_a_request(model: Fleet) -> None:
    url = model.serve(max_inflight_requests=1)
    inflight = model.apps[url].server.inflight
    with inflight:
        assert httpx.post(url + "/ping").status_code == 200
        assert httpx.post(url + "/tokenize", json={"prompt": "x"}).status_code == 503


def test_the_load_is_the_number_of_requests_under_way(model: Fleet) -> None:
    url = model.serve()

    def load() -> int:
        answer = httpx.get(url + "/load").json()
        assert set(answer) == {"server_load"}
        return int(answer["server_load"])

    assert load() == 0
    come = threading.Event()

    def body() -> Iterator[bytes]:
        yield b'{"prompt": '
        come.wait(60)
        yield b'"x"}'

    slow = threading.Thread(
        target=lambda: httpx.post(url + "/tokenize", content=body(), timeout=60)
    )
    slow.start()
    until(lambda: load() == 1)
    come.set()
    slow.join()
    until(lambda: load() == 0)


def test_the_load_is_shown_to_whom_the_metrics_are(model: Fleet) -> None:
    assert httpx.get(model.serve(metrics_public=False) + "/load").status_code == 403
    hidden = model.serve(metrics_public=False, admin_api_key=["chief"], api_key=["one"])
    assert httpx.get(hidden + "/load", headers={"authorization": "Bearer one"}).status_code == 403
    assert httpx.get(hidden + "/load", headers={"authorization": "Bearer chief"}).status_code == 200


def test_the_tokenizers_configuration_is_the_operators_to_show(
    model: Fleet, tmp_path: Path
) -> None:
    assert httpx.get(model.serve() + "/tokenizer_info").status_code == 403
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    shown = model.serve(
        enable_tokenizer_info_endpoint=True, api_key=["one"], chat_template=str(template)
    )
    assert httpx.get(shown + "/tokenizer_info").status_code == 401
    client = {"authorization": "Bearer one"}
    found = httpx.get(shown + "/tokenizer_info?model=tiny", headers=client).json()
    assert found["chat_template"] == TEMPLATE
    assert found["mask_token"] == "<mask>"
    assert isinstance(found["tokenizer_class"], str)
    assert "/home/somebody" not in json.dumps(found)
    assert str(model.path) not in json.dumps(found)
    missing = httpx.get(shown + "/tokenizer_info?model=other", headers=client)
    assert missing.status_code == 404


def test_the_server_tells_admins_of_itself_and_never_a_key(model: Fleet) -> None:
    assert httpx.get(model.serve() + "/server_info").status_code == 403
    url = model.serve(admin_api_key=["chief-key"], api_key=["one-key"], max_choices=7)
    assert (
        httpx.get(url + "/server_info", headers={"authorization": "Bearer one-key"}).status_code
        == 403
    )
    chief = {"authorization": "Bearer chief-key"}
    for query in ("", "?config_format=text", "?config_format=json"):
        answer = httpx.get(url + "/server_info" + query, headers=chief)
        found = answer.json()
        assert list(found) == ["inlay_config", "models", "system_env"]
        assert "chief-key" not in answer.text
        assert "one-key" not in answer.text
        assert "secret_fingerprint" not in answer.text
        assert found["models"][0]["name"] == "tiny"
    assert found["inlay_config"]["max_choices"] == 7
    wrong = httpx.get(url + "/server_info?config_format=xml", headers=chief)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "config_format")
