"""HTTPS with real certificates."""

import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from inlay.base.errors import InvalidRequestError
from inlay.http import FrontendSettings
from inlay.http.tls import Tls, expiry
from tests.certificates import Pair, certificate
from tests.live import Fleet, until
from tests.models import tiny
from tests.parts import running
from tests.serving import free_port


@pytest.fixture
def server_pair(tmp_path: Path) -> Pair:
    return certificate(tmp_path, "server")


def client(trusted: Path, pair: Pair | None = None) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(trusted))
    if pair is not None:
        context.load_cert_chain(*pair)
    return httpx.Client(verify=context, timeout=180)


def localhost(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


def test_a_server_with_a_certificate_speaks_https(llama: Fleet, server_pair: Pair) -> None:
    url = llama.serve(ssl_certfile=server_pair[0], ssl_keyfile=server_pair[1])
    assert url.startswith("https://")
    with client(server_pair[0]) as trusting:
        answer = trusting.post(
            localhost(url) + "/v1/completions", json={"prompt": "a", "max_tokens": 1}
        )
    assert answer.status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(localhost(url) + "/live")
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/live")


def test_a_key_may_lie_in_the_certificates_file(
    llama: Fleet, server_pair: Pair, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(server_pair[0].read_bytes() + server_pair[1].read_bytes())
    url = llama.serve(ssl_certfile=both)
    with client(server_pair[0]) as trusting:
        assert trusting.get(localhost(url) + "/live").status_code == 200


def test_metrics_say_when_the_certificate_ends(llama: Fleet, server_pair: Pair) -> None:
    url = llama.serve(ssl_certfile=server_pair[0], ssl_keyfile=server_pair[1])
    with client(server_pair[0]) as trusting:
        lines = trusting.get(localhost(url) + "/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("inlay:certificate_expiry")]
    (reachable,) = [line.split()[1] for line in lines if line.startswith("inlay:discovery_reach")]
    end = x509.load_pem_x509_certificate(server_pair[0].read_bytes()).not_valid_after_utc
    assert float(value) == end.timestamp()
    assert float(reachable) == 1


def test_what_is_no_certificate_has_no_end(server_pair: Pair) -> None:
    text = server_pair[0].read_text()
    lines = text.splitlines()
    for bad in ("", lines[0], text.replace(lines[2], ""), "\n".join((lines[0], "AAAA", lines[-1]))):
        with pytest.raises((ValueError, IndexError)):
            expiry(bad)


def test_old_versions_of_tls_are_not_spoken(server_pair: Pair) -> None:
    tls = Tls(FrontendSettings(ssl_certfile=server_pair[0], ssl_keyfile=server_pair[1]))
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_clients_may_have_to_show_a_certificate(
    llama: Fleet, server_pair: Pair, tmp_path: Path
) -> None:
    ours, other = certificate(tmp_path, "ours"), certificate(tmp_path, "other")
    url = localhost(
        llama.serve(
            ssl_certfile=server_pair[0],
            ssl_keyfile=server_pair[1],
            ssl_ca_certs=ours[0],
            ssl_cert_reqs=2,
        )
    )
    with client(server_pair[0], ours) as known:
        assert known.get(url + "/live").status_code == 200
    for pair in (None, other):
        with client(server_pair[0], pair) as unknown, pytest.raises(httpx.TransportError):
            unknown.get(url + "/live")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such file": ({"ssl_certfile": "none.crt"}, "No such file"),
    "no certificate": ({"ssl_certfile": "text"}, "cannot use"),
    "another's key": ({"ssl_certfile": "server.crt", "ssl_keyfile": "other.key"}, "MISMATCH"),
    "a key with a password": ({"ssl_certfile": "hidden.crt", "ssl_keyfile": "hidden.key"}, "cannot use"),
    "no authorities": ({"ssl_certfile": "server.crt", "ssl_keyfile": "server.key", "ssl_ca_certs": "text"}, "authorities"),
    "certificates of nobody": ({"ssl_certfile": "server.crt", "ssl_keyfile": "server.key", "ssl_cert_reqs": 2}, "--ssl-ca-certs"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_files_that_cannot_be_used_are_told_at_the_start(
    server_pair: Pair, tmp_path: Path, case: str
) -> None:
    certificate(tmp_path, "other")
    certificate(tmp_path, "hidden", password=b"secret")
    (tmp_path / "text").write_text("hello")
    fields, phrase = BAD[case]
    settings: dict[str, Any] = {
        name: tmp_path / value if isinstance(value, str) else value
        for name, value in fields.items()
    }
    with pytest.raises(InvalidRequestError, match=phrase):
        Tls.of(FrontendSettings(**settings))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def answers(trusted: Path, url: str, pair: Pair | None = None) -> bool:
    """Return True if a server answers with the certificate `trusted`."""
    try:
        with client(trusted, pair) as trusting:
            return trusting.get(url + "/ready").status_code == 200
    except (httpx.TransportError, ssl.SSLError):
        return False


async def test_a_broken_certificate_leaves_the_old_one_and_is_counted(
    server_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(FrontendSettings(ssl_certfile=server_pair[0], ssl_keyfile=server_pair[1]))
    old = tls.context
    server_pair[1].write_text("no key")
    await tls.files.reload()
    assert "were not reloaded" in caplog.text
    assert tls.context is old
    assert (tls.files.failures, tls.files.failing) == (1, True)


@pytest.mark.slow
def test_new_certificates_authorities_and_keys_are_used_without_a_signal(
    server_pair: Pair, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: one}")
    keys.chmod(0o600)
    ours, others = certificate(tmp_path, "ours"), certificate(tmp_path, "others")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(ours[0].read_bytes())
    port = free_port()
    words = (
        *(tiny("llama"), "--engine", "echo", "--port", port, "--api-key-file", keys),
        *("--ssl-certfile", server_pair[0], "--ssl-keyfile", server_pair[1]),
        *("--ssl-ca-certs", authorities, "--ssl-cert-reqs", 2),
    )
    with running("serve", *words, until="serving "):
        url = f"https://localhost:{port}"
        until(lambda: answers(server_pair[0], url, ours))
        assert not answers(server_pair[0], url, others)
        fresh = certificate(tmp_path, "fresh")
        for old, new in zip(server_pair, fresh, strict=True):
            old.write_bytes(new.read_bytes())
        keys.write_text("- {name: a, key: two}")
        authorities.write_bytes(others[0].read_bytes())
        until(lambda: answers(fresh[0], url, others))
        assert not answers(fresh[0], url, ours)
        with client(fresh[0], others) as trusting:

            def status(key: str) -> int:
                return trusting.get(url + "/v1/models", headers=bearer(key)).status_code

            until(lambda: status("two") == 200)
            assert status("one") == 401
            server_pair[1].write_text("no key")
            until(lambda: 'reload_failing{files="certificates"} 1.0' in shown(trusting, url))


def shown(trusting: httpx.Client, url: str) -> str:
    return trusting.get(url + "/metrics").text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGHUP is POSIX's")
def test_sighup_brings_new_certificates_and_keys_to_a_running_server(
    server_pair: Pair, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: one}")
    keys.chmod(0o600)
    port = free_port()
    words = (
        *(tiny("llama"), "--engine", "echo", "--port", port, "--api-key-file", keys),
        *("--ssl-certfile", server_pair[0], "--ssl-keyfile", server_pair[1]),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "inlay.cli", "serve", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    url = f"https://localhost:{port}"
    try:
        until(lambda: answers(server_pair[0], url))
        fresh = certificate(tmp_path, "fresh")
        for old, new in zip(server_pair, fresh, strict=True):
            old.write_bytes(new.read_bytes())
        keys.write_text("- {name: a, key: two}")
        process.send_signal(signal.SIGHUP)
        until(lambda: answers(fresh[0], url))
        with client(fresh[0]) as trusting:
            until(
                lambda: trusting.get(url + "/v1/models", headers=bearer("two")).status_code == 200
            )
            assert trusting.get(url + "/v1/models", headers=bearer("one")).status_code == 401
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
