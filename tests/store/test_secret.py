"""Sources of keys, and refused key files."""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.store import load_secret, read_key

KEY = bytes(range(32))


def key_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", KEY.hex().encode() + b"\r\n"],
)
def test_a_key_file_holds_32_bytes_or_their_hex_digits(tmp_path: Path, content: bytes) -> None:
    path = key_file(tmp_path, content)
    assert read_key(path) == KEY
    assert load_secret(file=path, state_dir=None).root == KEY
    assert load_secret(file=path, state_dir=tmp_path / "state").root == KEY
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "content",
    [b"", KEY[:31], KEY + b"\n", b"g" * 64, KEY.hex().encode()[:-1], b"00 " * 21 + b"0", KEY * 50],
)
def test_a_key_of_the_wrong_length_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"32 bytes or 64 hex digits; got {len(content)} bytes"
    ):
        read_key(key_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o620, 0o602, 0o601, 0o660])
def test_a_key_file_open_to_others_is_refused(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = key_file(tmp_path, KEY, mode)
    with pytest.raises(InvalidRequestError, match=f"has mode {mode:04o}"):
        read_key(path)


def test_a_key_file_of_root_may_be_shown_to_our_group_and_of_a_stranger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs files of another user")
    path = key_file(tmp_path, KEY, 0o440)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert read_key(path) == KEY
    path.chmod(0o460)
    with pytest.raises(InvalidRequestError, match="has mode 0460"):
        read_key(path)
    path.chmod(0o444)
    with pytest.raises(InvalidRequestError, match="allowed: 0440"):
        read_key(path)
    path.chmod(0o600)
    os.chown(path, 4321, -1)
    with pytest.raises(InvalidRequestError, match="belongs to user 4321"):
        read_key(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="not a regular file"):
        read_key(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(InvalidRequestError, match="not a regular file"):
        read_key(tmp_path / "fifo")


def test_a_state_directory_keeps_the_secret_it_made(tmp_path: Path) -> None:
    state = tmp_path / "a" / "state"
    mask = os.umask(0)
    try:
        first = load_secret(file=None, state_dir=state)
    finally:
        os.umask(mask)
    assert load_secret(file=None, state_dir=state).root == first.root
    assert [path.name for path in state.iterdir()] == ["secret"]
    assert stat.S_IMODE((state / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert load_secret(file=None, state_dir=tmp_path / "other").root != first.root


def test_without_file_or_state_directory_it_is_random() -> None:
    assert (
        load_secret(file=None, state_dir=None).root != load_secret(file=None, state_dir=None).root
    )


def test_a_damaged_kept_secret_is_not_replaced(tmp_path: Path) -> None:
    load_secret(file=None, state_dir=tmp_path)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(InvalidRequestError, match="got 5 bytes"):
        load_secret(file=None, state_dir=tmp_path)
    assert (tmp_path / "secret").read_bytes() == b"short"


def test_processes_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def load() -> bytes:
        start.wait()
        return load_secret(file=None, state_dir=tmp_path).root

    with ThreadPoolExecutor(8) as pool:
        roots = {future.result() for future in [pool.submit(load) for _ in range(8)]}
    assert len(roots) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_state_directory_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match="no secret can be kept in the state directory"):
        load_secret(file=None, state_dir=tmp_path / "file")
