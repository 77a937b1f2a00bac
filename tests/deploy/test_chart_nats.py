"""The NATS servers that the chart sets up, run from its own configuration, and their members."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from inlay.messages.digest import Secret
from inlay.transport.nats.member import Member
from inlay.transport.nats.settings import NatsSettings
from tests.certificates import certificate
from tests.deploy.chart import CHART, VALUES, named, pods, render
from tests.deploy.nats_pods import rendered, running
from tests.deploy.tools import ROOT, helms
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.deploy

PASSWORDS = ["word", "123456", "1e3", "true", "a b", "p@s/s:w?r%41d", "q\"'\\#{$PATH};,\u00fc"]
SECRET = Secret(bytes(range(32)))


def settings(objects: tuple[Any, ...], urls: list[str], files: Path) -> NatsSettings:
    """What a frontend's file tells it of NATS; `files` are in place of `/etc/inlay/nats`."""
    (frontend,) = [pod for pod in pods(objects) if pod.owner == "Deployment inlay-frontend"]
    told = yaml.safe_load(frontend.config or "")
    given = {
        key.replace("-", "_"): str(value).replace("/etc/inlay/nats", str(files))
        for key, value in told.items()
        if key.startswith("nats-") and key != "nats-wait"
    }
    return NatsSettings.model_validate({"nats": urls, "nats_wait": 30, **given})


def password_file(directory: Path, password: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "password").write_text(password)
    return directory


async def joins(given: NatsSettings) -> str:
    """The fingerprint of the namespace's secret, as a member that joins agrees on it."""
    member = await Member.join(given, "frontend")
    try:
        return (await member.secret(SECRET)).fingerprint
    finally:
        await member.leave()


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_server_takes_the_configuration(values: Path, tmp_path: Path) -> None:
    found = helms()
    if not found:
        pytest.skip("no Helm is there: make test-deploy fetches it")
    objects = render(next(iter(found.values())), values)
    if "inlay-nats" not in named(objects, "ConfigMap"):
        pytest.skip("these values have no server of their own")
    with running(objects, tmp_path, "word") as servers:
        assert "Server is ready" in servers.log(0)


@pytest.mark.parametrize("password", PASSWORDS)
def test_a_password_of_any_characters_lets_members_in_and_no_other_does(
    password: str, tmp_path: Path
) -> None:
    objects = rendered({}, tmp_path)
    with running(objects, tmp_path / "pods", password) as servers:
        good = settings(objects, [servers.url()], password_file(tmp_path / "a", password))
        assert asyncio.run(joins(good)) == SECRET.fingerprint
        bad = settings(objects, [servers.url()], password_file(tmp_path / "b", password + "x"))
        with pytest.raises(Exception, match="does not let us in"):
            asyncio.run(joins(bad))


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_frontends_pod_looks_at_its_fleet_without_a_word(command: str, tmp_path: Path) -> None:
    """As the runbooks begin: with what the pod has, and nothing else."""
    objects = rendered({"fleet": {"name": "blue"}}, tmp_path)
    files = password_file(tmp_path / "a", PASSWORDS[-1])
    (frontend,) = [pod for pod in pods(objects) if pod.owner == "Deployment inlay-frontend"]
    config = tmp_path / "inlay.yaml"
    config.write_text((frontend.config or "").replace("/etc/inlay/nats", str(files)))
    with running(objects, tmp_path / "pods", PASSWORDS[-1]) as servers:
        variables = {
            **{name: value for name, value in os.environ.items() if "INLAY_" not in name},
            "INLAY_CONFIG": str(config),
            "INLAY_NATS": servers.url(),
        }
        done = subprocess.run(
            [sys.executable, "-m", "inlay.cli", command],
            env=variables, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    said = done.stdout + done.stderr
    if command == "status":
        assert done.returncode == 0, said
        assert "no worker in namespace blue" in said
    else:
        assert "does not let us in" not in said, said
        assert re.search(r"nats.*ok|ok.*nats", said, re.IGNORECASE), said


@pytest.mark.parametrize("password", ["word", PASSWORDS[-1]])
def test_three_servers_form_a_cluster_and_one_of_them_may_be_lost(
    password: str, tmp_path: Path
) -> None:
    objects = rendered({"nats": {"replicas": 3}}, tmp_path)
    with running(objects, tmp_path / "pods", password) as servers:
        urls = [servers.url(number) for number in range(3)]
        given = settings(objects, urls, password_file(tmp_path / "a", password))
        assert given.nats_replicas == 3
        assert asyncio.run(joins(given)) == SECRET.fingerprint
        servers.kill(0)
        assert asyncio.run(joins(given)) == SECRET.fingerprint


def test_metrics_of_a_server_tell_its_store_and_the_servers_that_are_missing(
    tmp_path: Path,
) -> None:
    objects = rendered({"nats": {"replicas": 3, "metrics": {"enabled": True}}}, tmp_path)
    with running(objects, tmp_path / "pods", "word") as servers, servers.metrics(0) as url:

        def samples() -> dict[str, float]:
            try:
                lines = httpx.get(url, timeout=20).text.splitlines()
            except httpx.ConnectError:
                return {}
            return {name: float(value) for name, value in map(str.split, lines)}

        def until(name: str, value: float) -> dict[str, float]:
            deadline = time.monotonic() + 60
            while (found := samples()).get(name) != value:
                assert time.monotonic() < deadline, found
            return found

        found = until("inlay:nats_missing_servers", 0)
        assert found["inlay:nats_up"] == 1
        assert found["inlay:nats_store_limit_bytes"] == 20 * 2**30 * 4 // 5
        rules = (CHART / "files" / "rules.yaml").read_text()
        assert set(re.findall(r"inlay:nats_\w+", rules)) <= set(found)
        servers.kill(2)
        until("inlay:nats_missing_servers", 1)
        servers.kill(0)
        assert samples() == {"inlay:nats_up": 0}


def test_what_one_server_has_stored_moves_to_three_by_backup_and_restore(tmp_path: Path) -> None:
    """The servers keep their volumes; without the backup nothing is deleted either."""
    files = password_file(tmp_path / "a", "word")
    one = rendered({"nats": {"replicas": 1}}, tmp_path / "one")
    with running(one, tmp_path / "pods", "word") as servers:
        given = settings(one, [servers.url()], files)
        asyncio.run(_store(given, b"kept"))
        saved = _script("backup", servers.url(), files)
    three = rendered({"nats": {"replicas": 3}}, tmp_path / "three")
    with running(three, tmp_path / "pods", "word") as servers:
        given = settings(three, [servers.url(number) for number in range(3)], files)
        assert asyncio.run(_stored(given)) is None
        _script("restore", servers.url(), files, saved)
        assert asyncio.run(_stored(given)) == b"kept"
    with running(one, tmp_path / "pods", "word") as servers:
        assert asyncio.run(_stored(settings(one, [servers.url()], files))) == b"kept"


BUCKET = "inlay_default_prompts"


async def _store(given: NatsSettings, content: bytes) -> None:
    member = await Member.join(given, "frontend")
    try:
        await member.secret(SECRET)
        stream = member.control.jetstream
        await (await stream.create_object_store(BUCKET)).put("one", content)
        await (await stream.create_key_value(bucket=BUCKET)).put("one", b"record")
    finally:
        await member.leave()


async def _stored(given: NatsSettings) -> bytes | None:
    member = await Member.join(given, "frontend")
    try:
        try:
            found = await (await member.control.jetstream.object_store(BUCKET)).get("one")
        except Exception:
            return None
        return found.data
    finally:
        await member.leave()


def _script(word: str, url: str, files: Path, given: bytes = b"") -> bytes:
    environment = {
        "INLAY_NATS": url,
        "INLAY_NATS_USER": "inlay",
        "INLAY_NATS_PASSWORD_FILE": str(files / "password"),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "stored_prompts.py"), word],
        input=given, env=environment, capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_members_reach_a_server_of_ones_own_with_tls_and_a_password(tmp_path: Path) -> None:
    password = PASSWORDS[-2]
    pair = certificate(tmp_path, "pair", hosts=["localhost"])
    values = {
        "nats": {
            "enabled": False,
            "external": {
                "urls": ["tls://nats.example:4222"],
                "existingSecret": "access",
                "user": "members",
                "passwordKey": "password",
                "tlsCaKey": "ca.pem",
            },
        }
    }
    objects = rendered(values, tmp_path)
    files = password_file(tmp_path / "a", password)
    (files / "ca.pem").write_bytes(pair[0].read_bytes())
    extra = (
        f'tls {{ cert_file: "{pair[0]}", key_file: "{pair[1]}" }}\n'
        f'authorization {{ users: [ {{ user: members, password: "{password}" }} ] }}'
    )
    with NatsServer(tmp_path, extra=extra) as server:
        urls = [f"tls://localhost:{server.port}"]
        assert asyncio.run(joins(settings(objects, urls, files))) == SECRET.fingerprint


def test_jetstream_leaves_room_on_its_volume(tmp_path: Path) -> None:
    for size, bytes_ in (("20Gi", 20 * 2**30), ("3G", 3 * 10**9), ("1500M", 1500 * 10**6)):
        objects = rendered({"nats": {"persistence": {"size": size}}}, tmp_path / size)
        text = named(objects, "ConfigMap")["inlay-nats"]["data"]["nats.conf"]
        assert f"max_file_store: {bytes_ * 4 // 5} }}" in text
