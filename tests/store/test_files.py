"""The files of the disk tier: damage is refused, encryption hides."""

import logging
import os
from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError, NotFoundError, OverloadedError
from inlay.messages.digest import Secret
from tests.store.directories import KEY, ONE, SEALED_OR_NOT, SECRET, Opened, files, on_disk
from tests.store.making import HIDDEN, TTL, Clock, elements, put, target, upload_of


@SEALED_OR_NOT
def test_a_file_torn_at_any_byte_is_refused_and_removed(
    opened: Opened, directory: Path, key: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    put(opened(key=key), "alice", 1)
    opened(key=key)
    (path,) = files(directory)
    whole = path.read_bytes()
    assert opened.last is not None
    opened.last.close()
    opened.last = None
    # All of them at once: each length is a file of its own.
    with caplog.at_level(logging.ERROR):
        for length in range(len(whole)):
            (directory / f"{length:032x}.prompt").write_bytes(whole[:length])
            os.utime(directory / f"{length:032x}.prompt", (opened.clock.now, opened.clock.now))
        store = opened(key=key)
    assert store.stats().refused_files == len(whole)
    assert files(directory) == [path]
    assert store.stats().count == 1


@SEALED_OR_NOT
def test_a_file_with_any_byte_changed_is_refused_and_removed(
    opened: Opened, directory: Path, key: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    id_ = put(opened(key=key), "alice", 1, rows=4).id
    opened(key=key)
    (path,) = files(directory)
    whole = path.read_bytes()
    used = (opened.clock.now, opened.clock.now)
    refused = 0
    offsets = [*range(400), *range(400, 4096, 97), *range(4096, len(whole))]
    with caplog.at_level(logging.ERROR):
        for offset in offsets:
            changed = bytearray(whole)
            changed[offset] ^= 0x40
            path.write_bytes(changed)
            os.utime(path, used)
            store = opened(key=key)
            with pytest.raises(NotFoundError, match="not found"):
                store.rows("alice", id_, target())
            locked = store.stats().locked_files
            refused += store.stats().refused_files
            store.flush()
            assert bool(files(directory)) is bool(locked)
    assert refused == len(offsets)


def test_damage_found_at_use_is_logged_without_content(
    opened: Opened, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    id_ = put(opened(), "alice", 1).id
    store = opened()
    (path,) = files(directory)
    with path.open("r+b") as file:
        file.seek(4100)
        file.write(b"\xff" * 8)
    with pytest.raises(NotFoundError):
        store.rows("alice", id_, target())
    store.flush()
    assert files(directory) == []
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the stored prompt {path.stem} is refused and removed: its payload does not match its checksum"
    )
    assert "alice" not in caplog.text
    assert id_ not in caplog.text


def test_a_file_that_vanished_is_not_found(opened: Opened, directory: Path) -> None:
    id_ = put(opened(), "alice", 1).id
    store = opened()
    files(directory)[0].unlink()
    with pytest.raises(NotFoundError):
        store.rows("alice", id_, target())
    assert store.stats().disk_bytes == 0


def test_a_file_under_anothers_name_is_not_given_out(opened: Opened, directory: Path) -> None:
    mine, theirs = (put(opened(), tenant, seed).id for seed, tenant in enumerate(("alice", "bob")))
    store = opened()
    first, second = files(directory)
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    for tenant, id_ in (("alice", mine), ("bob", theirs)):
        with pytest.raises(NotFoundError):
            store.rows(tenant, id_, target())


def test_a_link_in_place_of_a_file_is_not_followed(
    opened: Opened, directory: Path, tmp_path: Path
) -> None:
    id_ = put(opened(), "alice", 1).id
    store = opened()
    (path,) = files(directory)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OverloadedError, match="cannot be read"):
        store.rows("alice", id_, target())


def test_files_under_another_secret_are_refused_and_removed(
    opened: Opened, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    id_ = put(opened(), "alice", 1).id
    other = Secret(bytes(32))
    store = opened(secret=other)
    assert store.stats().refused_files == 1
    assert (
        f"written under the secret {SECRET.fingerprint}; ours is {other.fingerprint}" in caplog.text
    )
    assert files(directory) == []
    with pytest.raises(NotFoundError):
        store.get("alice", id_)


# Encryption


def runs(data: bytes, length: int) -> set[bytes]:
    return {data[start : start + length] for start in range(len(data) - length + 1)}


def test_a_sealed_file_holds_nothing_of_the_tensor_or_its_owner(
    opened: Opened, directory: Path
) -> None:
    data, tensor = upload_of(1, rows=200, table_id="a-table-with-a-name")
    id_ = opened(key=KEY, memory=0).put("alice", data, tensor).id
    (path,) = files(directory)
    sealed = path.read_bytes()
    plain = bytes(tensor.data.view)
    assert not runs(sealed, 8) & runs(plain, 8)
    assert b"a-table" not in sealed
    assert id_.encode() not in sealed
    assert b"float32" not in sealed
    # The same test finds the tensor in a plain file.
    store = opened(memory=0)
    store.put("bob", data, tensor)
    unsealed = next(other for other in files(directory) if other != path).read_bytes()
    assert runs(unsealed, 64) >= runs(plain, 64)


def test_equal_prompts_are_sealed_differently(opened: Opened, directory: Path) -> None:
    store = opened(key=KEY, memory=0)
    for tenant in ("alice", "bob"):
        put(store, tenant, 1)
    first, second = (path.read_bytes()[4096:] for path in files(directory))
    assert not runs(first, 16) & runs(second, 16)


def test_a_prompt_of_several_chunks_comes_back(opened: Opened) -> None:
    data, tensor = upload_of(1, rows=3 * (1 << 20) // (4 * HIDDEN) + 5)
    store = opened(key=KEY, memory=0, disk=1 << 24)
    id_ = store.put("alice", data, tensor).id
    assert elements(store, "alice", id_) == bytes(tensor.data.view)


def test_without_its_key_a_sealed_prompt_is_missing_and_with_it_back(
    opened: Opened, directory: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    id_ = put(opened(key=KEY), "alice", 1).id
    for key, word in ((None, "we have none"), (bytes(32), "ours is")):
        caplog.clear()
        store = opened(key=key)
        assert word in caplog.text
        with pytest.raises(NotFoundError, match="not found"):
            store.rows("alice", id_, target())
        assert store.stats().locked_files == 1
        assert len(files(directory)) == 1
    assert elements(opened(key=KEY), "alice", id_)
    clock.now += TTL
    assert opened().stats().locked_files == 0
    assert files(directory) == []


def test_locked_files_take_room_from_others(opened: Opened, directory: Path) -> None:
    put(opened(key=KEY), "alice", 1)
    store = opened(memory=0, disk=3 * ONE)
    for seed in range(2, 6):
        put(store, "alice", seed)
        assert on_disk(directory) <= 3 * ONE


def test_plain_files_stay_readable_when_encryption_is_switched_on(opened: Opened) -> None:
    id_ = put(opened(), "alice", 1).id
    assert elements(opened(key=KEY), "alice", id_)


def test_a_key_of_the_wrong_length_is_refused(opened: Opened) -> None:
    with pytest.raises(InvalidRequestError, match="32 bytes, got 16"):
        opened(key=bytes(16))
