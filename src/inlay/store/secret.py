"""Sources of a namespace's root secret, and of other 32-byte keys.

A key file holds 32 raw bytes, or 64 hex digits and perhaps a newline (`openssl rand -hex 32`).
"""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from inlay.base.errors import InvalidRequestError, why_unusable
from inlay.messages.digest import Secret

KEY_BYTES = 32
SECRET_NAME = "secret"

_OTHERS = stat.S_IRWXO
_GROUP = stat.S_IRWXG


def load_secret(*, file: Path | None, state_dir: Path | None) -> Secret:
    """The root secret: that of `file`.

    Else the one kept in `state_dir`, made there at the first start; else random.

    With the secret anyone can make ids and digests, so what is stored under it does not outlive it:
    a store that is to survive a restart needs a file or a state directory.

    Args:
        file: a key file, which must exist.
        state_dir: a directory, made with mode 0700 when missing; the secret is its file `secret`,
            mode 0600.

    Raises:
        InvalidRequestError: a key file that is missing, not a regular file, of the wrong length, or
            open to others; a state directory that cannot be made or written.
    """
    if file is not None:
        return Secret(read_key(file))
    if state_dir is None:
        return Secret.random()
    path = state_dir / SECRET_NAME
    if not path.exists():
        _create(path)
    return Secret(read_key(path))


def read_key(path: Path) -> bytes:
    """The 32 bytes of a key file.

    The file must belong to this user or to root, and no other user may read it. The group may,
    where the file belongs to root and not to us: that is how secrets are mounted into containers.

    Raises:
        InvalidRequestError: it is missing or unreadable, not a regular file, of the wrong length,
            or open to others.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for someone to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidRequestError(
            f"the key file {path} cannot be read: {error.strerror}"
        ) from error
    try:
        status = os.fstat(descriptor)
        _check_private(path, status)
        data = os.read(descriptor, 2 * KEY_BYTES + 3)
    finally:
        os.close(descriptor)
    if len(data) == KEY_BYTES:
        return data
    with suppress(ValueError):
        key = bytes.fromhex(data.decode("ascii"))
        if len(key) == KEY_BYTES and len(data.rstrip(b"\r\n")) == 2 * KEY_BYTES:
            return key
    raise InvalidRequestError(
        f"the key file {path} must hold {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits; got "
        f"{status.st_size} bytes"
    )


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequestError(f"the key file {path} is not a regular file")
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        raise InvalidRequestError(
            f"the key file {path} belongs to user {status.st_uid}; it must belong to "
            f"{os.geteuid()} or to root"
        )
    mounted = status.st_uid == 0 and os.geteuid() != 0
    forbidden = _OTHERS | (stat.S_IWGRP if mounted else _GROUP)
    if mode & forbidden:
        raise InvalidRequestError(
            f"the key file {path} has mode {mode:04o}: others could read or change it; "
            f"allowed: {mode & ~forbidden:04o} (chmod 600)"
        )


def _create(path: Path) -> None:
    """A new random secret at `path`, unless another process is quicker.

    No one ever sees a part of it.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            with suppress(FileExistsError):
                # A link, unlike a rename, fails when the name is taken: the first secret stays.
                path.hardlink_to(draft)
        finally:
            draft.unlink()
    except OSError as error:
        raise InvalidRequestError(
            f"no secret can be kept in the state directory {path.parent}: {why_unusable(error)}"
        ) from error
