"""A worker process says why it cannot start, and never outlives the one that started it."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from inlay.base.errors import EngineError, InvalidRequestError, OverloadedError
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.transport.local import LocalPlane
from inlay.worker import spawn
from inlay.worker.child import find_temporary_directory

pytestmark = pytest.mark.usefixtures("started_processes")

SECRET = Secret(bytes(32))


async def test_a_model_that_is_not_there_is_the_reason_the_caller_hears(tmp_path: Path) -> None:
    process = await spawn(EngineSettings.of(model=str(tmp_path / "none"), engine="echo"), SECRET)
    plane = LocalPlane([process.channel])
    await plane.start()
    with pytest.raises(InvalidRequestError, match="no model at"):
        await plane.wait_ready()
    await plane.close()
    await process.close()


async def test_a_process_killed_before_it_is_ready_is_noticed(tmp_path: Path) -> None:
    process = await spawn(EngineSettings.of(model=str(tmp_path), engine="echo"), SECRET)
    os.kill(process.pid, signal.SIGKILL)
    plane = LocalPlane([process.channel])
    await plane.start()
    with pytest.raises(OverloadedError, match="ended before it was ready"):
        await plane.wait_ready()
    await plane.close()
    await process.close()


async def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 64}'
    )
    script = f"""
import asyncio, sys
from inlay.messages.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.transport.local import LocalPlane
from inlay.worker import spawn

async def main():
    settings = EngineSettings.of(model={str(tmp_path)!r}, engine="echo")
    process = await spawn(settings, Secret(bytes(32)))
    plane = LocalPlane([process.channel])
    await plane.start()
    await plane.wait_ready()
    sys.stdout.write(f"{{process.pid}}\\n")
    sys.stdout.flush()
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    worker_pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await asyncio.wait_for(asyncio.to_thread(_ended, worker_pid), 90)


def _ended(pid: int) -> None:
    while _runs(pid):
        time.sleep(0.05)


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def test_the_secret_is_in_no_argument_and_no_environment(tmp_path: Path) -> None:
    secret = Secret.random()
    process = await spawn(EngineSettings.of(model=str(tmp_path), engine="echo"), secret)
    for name in ("cmdline", "environ"):
        content = _read(process.pid, name)
        assert secret.root not in content
        assert secret.root.hex().encode() not in content
    await process.close()


def test_where_nothing_can_be_written_temporary_files_take_memory_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    usual = [tempfile.gettempdir()]
    monkeypatch.setattr(
        tempfile, "_candidate_tempdir_list", lambda: [os.environ.get("TMPDIR", usual[0])]
    )
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TMPDIR", raising=False)
    find_temporary_directory()
    assert "TMPDIR" not in os.environ
    assert not caplog.records
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr("inlay.worker.child._SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    find_temporary_directory()
    assert tempfile.gettempdir() == str(tmp_path)
    assert "set TMPDIR to one that can" in caplog.text
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    monkeypatch.setattr("inlay.worker.child._SHARED_MEMORY", Path("/proc/nowhere"))
    with pytest.raises(EngineError, match="set TMPDIR to one that can"):
        find_temporary_directory()
