"""The directory of a disk tier: private, ours alone, its files whole or not there.

A stored prompt is a file `NAME.prompt`, NAME being random; an empty `NAME.pin` beside it says that
it is pinned. Its modification time is its last use. A file is written as `NAME.tmp`, synced, then
renamed. Any other file is left alone. A tier of another kind has an ending of its own.
"""

import fcntl
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Generic

import msgspec

from inlay.base.errors import InvalidRequestError, why_unusable
from inlay.messages.prompt import Buffer
from inlay.store.entry import PAGE, StoredFile
from inlay.store.file_format import D, DamagedFileError, FileFormat, LockedFileError

_log = logging.getLogger(__name__)

_PIN, _DRAFT, _LOCK = ".pin", ".tmp", "lock"
_ours = re.compile(r"(?P<name>[0-9a-f]{32})(?P<ending>\.[a-z]+)")
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


class FoundFile(msgspec.Struct, Generic[D], frozen=True):
    """A file that was there at the start.

    Attributes:
        file: its name and cost.
        description: of its payload.
        used_at: its last use, seconds since the epoch.
        pinned: whether it is pinned.
    """

    file: StoredFile
    description: D
    used_at: float
    pinned: bool


class Survey(msgspec.Struct, Generic[D]):
    """Files found in a directory.

    Attributes:
        found: those that can be used.
        refused: files that are no whole ones of this secret.
        locked: (file, last use) of those that are sealed with another key; left where they are.
    """

    found: list[FoundFile[D]] = msgspec.field(default_factory=list)
    refused: list[StoredFile] = msgspec.field(default_factory=list)
    locked: list[tuple[StoredFile, float]] = msgspec.field(default_factory=list)


class Directory(Generic[D]):
    """One store's directory, locked against any other store.

    Args:
        path: of the directory.
        file_format: of its files.
        ending: of their names.
        noun: for what a file holds, in log lines.
        durable: return from a write when the file outlives a loss of power; otherwise it may be
            found torn then.

    Raises:
        InvalidRequestError: it cannot be made or used, others may enter it, or another store has
            it.
    """

    __slots__ = ("_descriptor", "_durable", "_ending", "_format", "_lock", "_noun", "path")

    def __init__(
        self,
        path: Path,
        file_format: FileFormat[D],
        *,
        ending: str = ".prompt",
        noun: str = "stored prompt",
        durable: bool = True,
    ) -> None:
        self.path = path
        self._format = file_format
        self._ending = ending
        self._noun = noun
        self._durable = durable
        try:
            path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequestError(
                f"the store's directory {path} cannot be used: {why_unusable(error)}"
            ) from error
        try:
            self._check_private()
            self._lock = self._locked()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _check_private(self) -> None:
        status = os.fstat(self._descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            raise InvalidRequestError(
                f"the store's directory {self.path} has mode {mode:04o} and belongs to user "
                f"{status.st_uid}; it must have "
                f"mode {_DIRECTORY_MODE:04o} and belong to user {os.geteuid()}"
            )

    def _locked(self) -> int:
        try:
            descriptor = self._open(_LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise InvalidRequestError(
                f"the store's directory {self.path} cannot be written: {error.strerror}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InvalidRequestError(
                f"the store's directory {self.path} is in use by another store"
            ) from error
        return descriptor

    def _open(self, name: str, flags: int) -> int:
        return os.open(
            name,
            flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
            _FILE_MODE,
            dir_fd=self._descriptor,
        )

    def cost(self, description: D) -> int:
        """Bytes that the file of a payload counts for."""
        return _cost(self._format.file_size(description.num_bytes))

    def write(self, description: D, data: Buffer, used_at: float) -> StoredFile:
        """Write a file; it is there whole or, when this raises `OSError`, not at all."""
        name = secrets.token_hex(16)
        draft = name + _DRAFT
        try:
            descriptor = self._open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self._format.write(descriptor, description, data)
                os.utime(descriptor, (used_at, used_at))
                if self._durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            whole = name + self._ending
            os.rename(draft, whole, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            if self._durable:
                self.sync()
        except OSError:
            for ending in (_DRAFT, self._ending):
                with suppress(OSError):  # the error that brought us here says more
                    self._unlink(name + ending)
            raise
        return StoredFile(name, self.cost(description))

    def read(self, file: StoredFile, description: D) -> Buffer:
        """The payload of a file.

        Raises:
            DamagedFileError: the file is torn, changed, or that of another payload.
            FileNotFoundError: it is gone.
            OSError: it cannot be read.
        """
        descriptor = self._open(file.name + self._ending, os.O_RDONLY)
        try:
            header = self._format.read_header(descriptor)
            self._format.check(header, description)
            return self._format.read_payload(descriptor, header)
        except LockedFileError as error:
            raise DamagedFileError(str(error)) from error
        finally:
            os.close(descriptor)

    def remove(self, file: StoredFile) -> None:
        """Remove a file and its pin, if they are there. Raises `OSError`."""
        self._unlink(file.name + self._ending)
        self._unlink(file.name + _PIN)

    def sync(self) -> None:
        """Return when what was removed stays so even after a crash. Raises `OSError`."""
        os.fsync(self._descriptor)

    def set_pinned(self, file: StoredFile, pinned: bool) -> None:
        """Note whether a file is pinned. Raises `OSError`."""
        if pinned:
            os.close(self._open(file.name + _PIN, os.O_WRONLY | os.O_CREAT))
        else:
            self._unlink(file.name + _PIN)
        self.sync()

    def set_used(self, file: StoredFile, used_at: float) -> None:
        """Note a file's last use; nothing if it is gone. Raises `OSError`."""
        with suppress(FileNotFoundError):
            os.utime(
                file.name + self._ending,
                (used_at, used_at),
                dir_fd=self._descriptor,
                follow_symlinks=False,
            )

    def survey(self) -> Survey[D]:
        """Look at every file: headers and lengths, not payloads. Drafts and stray pins are removed.

        Raises:
            InvalidRequestError: the directory cannot be read or changed.
        """
        survey: Survey[D] = Survey()
        names: dict[str, set[str]] = {self._ending: set(), _PIN: set(), _DRAFT: set()}
        try:
            with os.scandir(self._descriptor) as entries:
                for entry in entries:
                    match = _ours.fullmatch(entry.name)
                    if match is not None and match["ending"] in names:
                        names[match["ending"]].add(match["name"])
            for name in names[_DRAFT]:
                self._unlink(name + _DRAFT)
            for name in names[_PIN] - names[self._ending]:
                self._unlink(name + _PIN)
        except OSError as error:
            raise InvalidRequestError(
                f"the store's directory {self.path} cannot be used: {why_unusable(error)}"
            ) from error
        for name in sorted(names[self._ending]):
            self._look(name, name in names[_PIN], survey)
        return survey

    def _look(self, name: str, pinned: bool, survey: Survey[D]) -> None:
        try:
            descriptor = self._open(name + self._ending, os.O_RDONLY)
            try:
                status = os.fstat(descriptor)
                file = StoredFile(name, _cost(status.st_size))
                header = self._format.read_header(descriptor)
            finally:
                os.close(descriptor)
        except LockedFileError as error:
            _log.warning("the %s %s is left alone: %s", self._noun, name, error)
            survey.locked.append((file, status.st_mtime))
        except DamagedFileError as error:
            _log.warning("the %s %s is refused and removed: %s", self._noun, name, error)
            survey.refused.append(file)
        except OSError as error:
            _log.warning("the %s %s cannot be read: %s", self._noun, name, error.strerror)
        else:
            survey.found.append(FoundFile(file, header.description, status.st_mtime, pinned))

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def close(self) -> None:
        """Let another store have the directory."""
        os.close(self._lock)
        os.close(self._descriptor)
        # A number that is open again may be anything; this one never is.
        self._descriptor = self._lock = -1


def _cost(file_size: int) -> int:
    return -(-file_size // PAGE) * PAGE
