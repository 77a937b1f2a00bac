"""Workers of a fleet are held to one reference, whichever of them made it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from inlay.engine.pool_reference import PoolReference, key_of
from inlay.engine.torch.native.build import _directory
from inlay.engine.weights import weights_id
from inlay.messages.digest import Secret
from inlay.transport.nats.member import Member
from inlay.transport.nats.references import ReferenceRecord
from tests.models import tiny
from tests.parts import Part
from tests.serving import serving
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.slow
END_SECONDS = 90


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def status(server: NatsServer, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "inlay.cli", "status", "--nats", server.url, *words],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        check=True,
    ).stdout


async def exchange_logprobs(server: NatsServer, secret: Secret) -> bytes:
    """Have the fleet keep a reference with other logprobs than the model's; return what it had."""
    member = await Member.join(server.settings(), "worker")
    record = ReferenceRecord(member, secret)
    key = key_of(weights_id(tiny("qwen3")), "bfloat16")
    data = await record.settle(key, None, False)
    assert data is not None
    kept = PoolReference.decode(data, 1 << 20)
    ids = np.frombuffer(kept.ids, "<i4")[::-1].tobytes()
    await record.settle(key, replace(kept, ids=ids).encode(), True)
    await member.leave()
    return data


def test_further_workers_start_by_what_the_first_found_and_one_that_differs_does_not_join(
    server: NatsServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(bytes(range(32)).hex())
    secret.chmod(0o600)
    parts: list[Part] = []

    def worker(name: str, *words: object, until: str = " serves ") -> Part:
        """One on a machine of its own, but for compiled kernels."""
        cache = tmp_path / name / "inlay"
        cache.mkdir(parents=True)
        (cache / "kernels").symlink_to(_directory())
        part = Part(
            *("worker", tiny("qwen3"), "--dtype", "bfloat16", "--device", "cpu"),
            *("--num-threads", 1, "--nats", server.url, "--secret-file", secret),
            *("--served-model-name", "m", *words),
            until=until,
            variables={"XDG_CACHE_HOME": str(tmp_path / name)},
        )
        parts.append(part)
        return part.wait_ready()

    try:
        first = worker("first")
        assert not any(", kept (allowed: 2)" in line for line in first.said)
        second = worker("second", "--self-check", "strict")
        made = [line for line in second.said if "self-check: passed" in line]
        assert len(made) == 1
        assert ", kept (allowed: 2)" in made[0]
        assert any(", kept (allowed: 3)" in line for line in second.said)
        assert len(list((tmp_path / "second" / "inlay" / "self-check").iterdir())) == 2
        second.end()

        made_first = asyncio.run(exchange_logprobs(server, Secret(bytes(range(32)))))
        strict = worker("strict", "--self-check", "strict", until="--self-check strict: ")
        assert strict.wait() == 1
        assert "its logprobs are not those of transformers" in strict.said[-1]
        worker("marked")
        given = ("--nats", server.url, "--secret-file", secret)
        with serving(*given, command="frontend") as frontend:
            reason = "it is loading its model"
            while reason == "it is loading its model":
                health = httpx.get(f"{frontend.url}/health").json()
                assert health["status"] == "degraded"
                ((name, reason),) = health["missing"].items()
            assert reason.startswith("its logprobs are not those of transformers")
            assert len(health["workers"]) == 1
            said = json.loads(status(server, "--output-json"))
            assert said["missing"] == {name: reason}
            assert isinstance(said["workers"], list)
            states = {one["id"].rpartition(".")[0]: one["state"] for one in said["workers"]}
            assert states.pop(name) == "refused"
            assert list(states.values()) == ["ready"]
            results = {one["self_check"]["result"] for one in said["workers"]}
            assert results == {"passed", "differs"}
            assert "(self-check: differs)" in status(server)

        worker("again", "--self-check", "full")
        assert asyncio.run(exchange_logprobs(server, Secret(bytes(range(32))))) == made_first
    finally:
        for part in parts:
            part.end()
