"""A disk that has no room costs what it does not take: requests go on, and what it has is whole."""

import errno
import logging
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from inlay.transport.local.arena import anonymous_file
from tests.commands import run
from tests.engine.torch.test_page_tiers import NAMES, keeping, runs, small, told
from tests.models import tiny

Full: TypeAlias = Callable[[], AbstractContextManager[None]]


@contextmanager
def small_files(path: Path) -> Iterator[Full]:
    """Files of this process may not grow: a write ends in the middle."""

    @contextmanager
    def full() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    yield full


@contextmanager
def small_disk(path: Path) -> Iterator[Full]:
    """A file system of its own with room for a few pages."""

    def mount(*words: str) -> None:
        command = ["mount", *words, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")

    path.mkdir(mode=0o700)
    mount("-t", "tmpfs", "-o", "size=2m,mode=700", "none")
    try:

        @contextmanager
        def full() -> Iterator[None]:
            mount("-o", "remount,size=64k")
            yield
            mount("-o", "remount,size=2m")

        yield full
    finally:
        run("umount", path)


@pytest.mark.thorough
@pytest.mark.parametrize("limited", [small_files, small_disk])
async def test_a_disk_that_fills_costs_what_it_does_not_take(
    limited: Callable[[Path], AbstractContextManager[Full]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)
    config, memory, path = await small(tiny("llama")), anonymous_file(1 << 20), tmp_path / "pages"
    options: dict[str, Any] = {"kv_offloading_size": None, "kv_offloading_dir": path}
    with limited(path) as full:
        async with keeping(config, memory, **options) as (engine, tiers):
            with full():
                truth = await told(engine, tiers, *NAMES)
                # More of what it does not take, all while it is full.
                assert await told(engine, tiers, *NAMES) == truth
                tiers.write_rest()
            # It is tried once, not for each page, and said once.
            assert engine.stats().kv_disk_errors == 1
            assert [each.message for each in caplog.records] == [
                "pages cannot be written for a while: "
                + os.strerror(errno.ENOSPC if limited is small_disk else errno.EFBIG)
            ]
            # No piece of a file is left, and what is said to be there is there.
            assert {each.name for each in path.iterdir()} - {
                each.name for each in runs(tmp_path)
            } == {"lock"}
            assert engine.stats().kv_disk_bytes == sum(
                each.stat().st_size for each in runs(tmp_path)
            )
            assert await told(engine, tiers, *NAMES) == truth
            # Once it has room again it is used again.
            monkeypatch.setattr(tiers.disk, "_paused_until", 0.0)
            for _ in range(2):
                assert await told(engine, tiers, *NAMES) == truth
                tiers.write_rest()
            stats = engine.stats()
            assert stats.kv_pages_from_disk > 0
            assert (stats.kv_disk_errors, stats.kv_disk_refused_files) == (1, 0)
            assert stats.kv_pages_refused == 0
    os.close(memory)
