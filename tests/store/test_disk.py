"""The disk tier: restarts, bounds, failing disks, many threads."""

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from inlay.base.errors import InvalidRequestError, NotFoundError, OverloadedError
from inlay.messages.prompt import Buffer
from inlay.store import PromptStore
from inlay.tensors import ReadLimits, read, write
from tests.store.directories import MANY, ONE, SEALED_OR_NOT, SECRET, Opened, files, on_disk
from tests.store.making import HIDDEN, TTL, Clock, elements, put, target, upload_of


@SEALED_OR_NOT
def test_what_was_uploaded_survives_a_restart(
    opened: Opened, clock: Clock, key: bytes | None
) -> None:
    store = opened(key=key)
    data, tensor = upload_of(1, rows=100, table_id="table")
    stored = store.put("alice", data, tensor)
    store.rows("alice", stored.id, target("bfloat16"))
    store = opened(key=key)
    assert store.get("alice", stored.id) == stored
    assert store.stats().memory_bytes == 0
    assert elements(store, "alice", stored.id) == bytes(tensor.data.view)
    with pytest.raises(InvalidRequestError, match="embedding table"):
        store.rows("alice", stored.id, target(table_id="other"))
    assert store.stats().loads == 1
    with pytest.raises(NotFoundError):
        store.get("bob", stored.id)
    assert store.put("alice", data, tensor).id == stored.id
    assert store.stats().count == 1


@pytest.mark.parametrize("batch", [(3, 5), (1, 5)])
def test_a_batch_survives_a_restart(opened: Opened, batch: tuple[int, int]) -> None:
    array = np.arange(batch[0] * batch[1] * HIDDEN, dtype=np.float32).reshape(*batch, HIDDEN)
    data = write(array, "torch")
    stored = opened().put("alice", Buffer(data), read(data, limits=ReadLimits()))
    store = opened()
    assert store.get("alice", stored.id) == stored
    assert len(store.rows("alice", stored.id, target())) == batch[0]
    assert elements(store, "alice", stored.id) == array.tobytes()


def test_a_crash_loses_nothing_that_was_written(
    opened: Opened, directory: Path, tmp_path: Path
) -> None:
    store = opened()
    id_ = put(store, "alice", 1).id
    store.flush()
    crashed = tmp_path / "crashed"
    crashed.mkdir(mode=0o700)
    for path in directory.iterdir():
        (crashed / path.name).write_bytes(path.read_bytes())
    (crashed / ("0" * 32 + ".tmp")).write_bytes(b"half")
    (crashed / ("1" * 32 + ".pin")).touch()
    (crashed / "somebody else's").touch()
    other = PromptStore(
        SECRET, memory_bytes=MANY, disk_bytes=MANY, directory=crashed, ttl=1e12, clock=opened.clock
    )
    assert elements(other, "alice", id_) == elements(store, "alice", id_)
    other.close()
    left = {path.name for path in crashed.iterdir()} - {path.name for path in files(crashed)}
    assert left == {"lock", "somebody else's"}


def test_directory_and_files_are_for_their_owner_alone(opened: Opened, directory: Path) -> None:
    mask = os.umask(0)
    try:
        store = opened()
        store.pin("alice", put(store, "alice", 1).id, True)
        store.flush()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(list(directory.iterdir())) == 3
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_names_of_files_say_nothing(opened: Opened, directory: Path) -> None:
    store = opened()
    id_ = put(store, "alice", 1).id
    store.flush()
    (first,) = files(directory)
    assert id_[3:] not in first.name
    store.delete("alice", id_)
    put(store, "alice", 1)
    store.flush()
    (second,) = files(directory)
    assert first.name != second.name


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_directory_that_others_may_enter_is_refused(
    directory: Path, opened: Opened, mode: int
) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(InvalidRequestError, match=f"has mode {mode:04o}.*must have mode 0700"):
        opened()


def test_a_directory_belongs_to_one_store_at_a_time(opened: Opened, directory: Path) -> None:
    opened()
    with pytest.raises(InvalidRequestError, match="in use by another store"):
        PromptStore(SECRET, memory_bytes=MANY, disk_bytes=MANY, directory=directory, ttl=TTL)


def test_a_closed_directory_touches_no_other(directory: Path) -> None:
    from inlay.store.directory import Directory
    from inlay.store.entry import Description, StoredFile
    from inlay.store.file_format import FileFormat
    from inlay.store.names import Names

    closed = Directory(directory, FileFormat(Names(SECRET), None, Description))
    closed.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        closed.remove(StoredFile("0" * 32, 4096))


def test_a_directory_that_is_a_file_is_refused(directory: Path, opened: Opened) -> None:
    directory.touch()
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        opened()


def test_uses_and_pins_survive_a_restart(opened: Opened, directory: Path, clock: Clock) -> None:
    store = opened()
    used, unused, pinned = (put(store, "alice", seed).id for seed in range(3))
    store.pin("alice", pinned, True)
    clock.now += TTL * 0.75
    store.rows("alice", used, target())
    store = opened()
    clock.now += TTL * 0.5
    assert store.get("alice", used).expires_at == clock.now + TTL * 0.5
    assert store.get("alice", pinned).pinned
    with pytest.raises(NotFoundError):
        store.get("alice", unused)
    store.pin("alice", pinned, False)
    clock.now += TTL
    store = opened()
    assert store.stats().count == 0
    assert list(directory.glob("*.p*")) == []


def test_a_use_is_noted_before_a_crash_could_forget_it(
    opened: Opened, directory: Path, clock: Clock
) -> None:
    store = opened()
    id_ = put(store, "alice", 1).id
    store.flush()
    clock.now += TTL / 2
    store.rows("alice", id_, target())
    store.flush()
    assert files(directory)[0].stat().st_mtime == clock.now


def test_a_file_from_the_future_does_not_live_longer(
    opened: Opened, directory: Path, clock: Clock
) -> None:
    id_ = put(opened(), "alice", 1).id
    clock.now -= 10 * TTL
    store = opened()
    assert store.get("alice", id_).expires_at == clock.now + TTL


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_deleted_prompt_is_in_no_tier_when_delete_returns(
    opened: Opened, directory: Path, resident: bool, pinned: bool
) -> None:
    store = opened()
    id_ = put(store, "alice", 1).id
    if not resident:
        store = opened()
    store.pin("alice", id_, pinned)
    store.delete("alice", id_)
    assert list(directory.iterdir()) == [directory / "lock"]
    assert (store.stats().memory_bytes, store.stats().disk_bytes) == (0, 0)
    store.flush()
    with pytest.raises(NotFoundError):
        opened().get("alice", id_)


def test_deleting_while_it_is_being_written_leaves_no_file(opened: Opened, directory: Path) -> None:
    store = opened(memory=1 << 24, disk=1 << 24)
    for seed in range(10):
        store.delete("alice", put(store, "alice", seed, rows=20_000).id)
        assert files(directory) == []
    store.flush()
    assert files(directory) == []
    assert store.stats().disk_bytes == 0


def test_memory_is_a_cache_of_what_is_on_disk(opened: Opened, directory: Path) -> None:
    store = opened(memory=3 * ONE)
    ids = [put(store, "alice", seed).id for seed in range(20)]
    for seed, id_ in enumerate(ids):
        assert elements(store, "alice", id_) == bytes(upload_of(seed)[1].data.view)
        assert store.stats().memory_bytes <= 3 * ONE
    store.flush()
    stats = store.stats()
    assert (stats.count, stats.evictions, stats.spills) == (20, 0, 20)
    assert stats.disk_bytes == 20 * ONE == on_disk(directory)


def test_digests_are_kept_when_the_elements_leave_memory(opened: Opened) -> None:
    store = opened(memory=4 * ONE)
    id_ = put(store, "alice", 1).id
    digests = tuple(rows.digests for rows in store.rows("alice", id_, target()))
    for seed in range(2, 5):
        put(store, "alice", seed)
        store.flush()
    put(store, "alice", 5, rows=8)
    store.flush()
    put(store, "alice", 6, rows=8)
    assert store.ready("alice", id_, target()) is None
    assert store.digests("alice", id_, target()) == digests
    assert tuple(rows.digests for rows in store.rows("alice", id_, target())) == digests


def test_an_upload_too_large_for_memory_goes_straight_to_disk(opened: Opened) -> None:
    store = opened(memory=ONE)
    data, tensor = upload_of(1, rows=1000)
    id_ = store.put("alice", data, tensor).id
    assert (store.stats().memory_bytes, store.stats().spills) == (0, 1)
    for wanted in ("float32", "bfloat16"):
        assert store.rows("alice", id_, target(wanted))[0].shape == (1000, HIDDEN)
    assert elements(opened(memory=0), "alice", id_) == bytes(tensor.data.view)


def test_the_least_recently_used_file_goes_first_and_never_a_pinned_one(
    opened: Opened, directory: Path, clock: Clock
) -> None:
    store = opened(memory=0, disk=4 * ONE)
    ids = [put(store, "alice", seed).id for seed in range(4)]
    store.pin("alice", ids[0], True)
    store.rows("alice", ids[1], target())
    put(store, "alice", 5)
    for id_ in (ids[0], ids[1], ids[3]):
        store.get("alice", id_)
    with pytest.raises(NotFoundError):
        store.get("alice", ids[2])
    assert on_disk(directory) == store.stats().disk_bytes == 4 * ONE
    for id_ in (ids[1], ids[3]):
        store.pin("alice", id_, True)
    store.delete("alice", put(store, "alice", 5).id)
    store.pin("alice", put(store, "alice", 6).id, True)
    with pytest.raises(OverloadedError, match="pinned"):
        put(store, "alice", 7)
    assert store.stats().count == 4


def test_a_smaller_disk_keeps_what_is_pinned_and_what_was_used_last(
    opened: Opened, directory: Path, clock: Clock
) -> None:
    store = opened()
    ids = []
    for seed in range(5):
        ids.append(put(store, "alice", seed).id)
        clock.now += 1
    store.pin("alice", ids[0], True)
    store = opened(disk=3 * ONE)
    assert store.stats().count == 3
    for id_ in (ids[0], ids[3], ids[4]):
        store.get("alice", id_)
    assert on_disk(directory) == 3 * ONE
    put(store, "alice", 9)
    store.flush()
    store = opened(disk=3 * ONE)
    with pytest.raises(NotFoundError):
        store.get("alice", ids[3])
    assert opened(max_entries=1).get("alice", ids[0]).pinned


# Failing disks


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk on which every write fails while the list holds True.

    A file system cannot be filled in a test.
    """
    failing = [False]
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if failing[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    return failing


def test_on_a_full_disk_uploads_stay_in_memory_and_are_written_later(
    opened: Opened, directory: Path, full_disk: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    full_disk[0] = True
    id_ = put(store, "alice", 1).id
    store.flush()
    assert list(directory.iterdir()) == [directory / "lock"]
    assert (store.stats().disk_errors, store.stats().disk_bytes) == (1, 0)
    assert "cannot be written: No space left on device" in caplog.text
    assert elements(store, "alice", id_)
    full_disk[0] = False
    store.sweep()
    store.flush()
    assert store.stats().disk_bytes == ONE == on_disk(directory)
    assert elements(opened(), "alice", id_)


def test_a_full_disk_and_no_room_in_memory_fail_the_upload_cleanly(
    opened: Opened, directory: Path, full_disk: list[bool]
) -> None:
    store = opened(memory=0)
    full_disk[0] = True
    with pytest.raises(OverloadedError):
        put(store, "alice", 1)
    assert list(directory.iterdir()) == [directory / "lock"]
    stats = store.stats()
    assert (stats.count, stats.memory_bytes, stats.disk_bytes) == (0, 0, 0)
    full_disk[0] = False
    put(store, "alice", 1)


def test_with_a_full_disk_the_store_is_one_in_memory(
    opened: Opened, full_disk: list[bool], directory: Path
) -> None:
    store = opened(memory=3 * ONE)
    full_disk[0] = True
    ids = [put(store, "alice", seed).id for seed in range(5)]
    assert store.stats().count == 3
    assert elements(store, "alice", ids[-1])
    assert files(directory) == []


def test_a_file_that_cannot_be_removed_is_not_called_deleted(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    id_ = put(store, "alice", 1).id
    store.flush()

    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        with pytest.raises(OverloadedError, match="cannot be removed"):
            store.delete("alice", id_)
    store.get("alice", id_)
    store.delete("alice", id_)
    with pytest.raises(NotFoundError):
        store.get("alice", id_)


# Many at once


@pytest.mark.thorough
@SEALED_OR_NOT
def test_under_many_threads_bounds_hold_and_nobody_gets_anothers_elements(
    opened: Opened, directory: Path, key: bytes | None
) -> None:
    places = 6
    store = opened(memory=places * ONE, disk=2 * places * ONE, key=key)
    uploads = {seed: upload_of(seed) for seed in range(24)}
    stop = threading.Event()
    over: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            stats = store.stats()
            if stats.memory_bytes > places * ONE or on_disk_now() > 2 * places * ONE:
                over.append(stats.memory_bytes)

    def on_disk_now() -> int:
        total = 0
        for path in (*files(directory), *directory.glob("*.tmp")):
            try:
                total += -(-path.stat().st_size // 4096) * 4096
            except FileNotFoundError:
                continue
        return total

    def work(thread: int) -> int:
        random = np.random.default_rng(thread)
        used = 0
        for _ in range(60):
            seed = int(random.integers(len(uploads)))
            tenant = f"tenant {seed % 3}"
            data, tensor = uploads[seed]
            id_ = store.put(tenant, data, tensor).id
            try:
                (rows,) = store.rows(tenant, id_, target())
                assert rows.data == tensor.data
                used += 1
                if random.random() < 0.1:
                    store.pin(tenant, id_, bool(random.random() < 0.3))
                if random.random() < 0.1:
                    store.delete(tenant, id_)
                for other in range(3):
                    if other != seed % 3:
                        with pytest.raises(NotFoundError):
                            store.get(f"tenant {other}", id_)
            except NotFoundError:
                continue
        return used

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(6) as pool:
        used = [future.result() for future in [pool.submit(work, thread) for thread in range(6)]]
    stop.set()
    watcher.join()
    assert min(used) > 20
    assert over == []
    store.flush()
    assert on_disk(directory) == store.stats().disk_bytes
