"""The disk tier: files written, read and removed for the entries of an index."""

import logging
import threading
from functools import partial

from inlay.base.errors import OverloadedError
from inlay.messages.prompt import Buffer
from inlay.store.background import BackgroundThread
from inlay.store.directory import Directory, FoundFile
from inlay.store.entry import Description, Entry, StoredFile
from inlay.store.file_format import DamagedFileError
from inlay.store.index import StoreIndex

_log = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds after which a fault of the disk may have passed."""

NOTES_PER_TTL = 8
"""Shortest period of noting the last use of an entry in its file.

A crash may shorten its time to live by as much.
"""


class DiskTier:
    """Keeps files in step with an index.

    Files are written and removed by one thread at a time, those that the index has dropped always
    before the next is written: so the directory never exceeds the index's bound. Reading
    needs no turn.

    Args:
        directory: of the files; closed with this.
        ledger: the index of the entries.
        lock: guards the index; never held during IO. Taken after this tier's own.
        now: seconds since the epoch, to tell which files have expired.

    Attributes:
        written: files written.
        refused: files removed because they were torn, changed, or of another secret.
        locked: files left alone at the start, as they are sealed with another key.
        errors: reads, writes and removals that failed.

    Raises:
        InvalidRequestError: the directory cannot be read.
    """

    def __init__(
        self,
        directory: Directory[Description],
        ledger: StoreIndex,
        lock: threading.Lock,
        now: float,
    ) -> None:
        self._directory = directory
        self._index = ledger
        self._lock = lock
        self._turn = threading.Lock()
        self.written = self.refused = self.locked = self.errors = 0
        try:
            self._restore(now)
        except BaseException:
            directory.close()
            raise
        self._background = BackgroundThread("inlay-store")

    def _restore(self, now: float) -> None:
        """Enter the prompts whose files are there.

        Pinned ones, then those used last, as far as the bounds allow.
        """
        survey = self._directory.survey()
        self.refused = len(survey.refused)
        trash, ttl = self._index.trash, self._index.limits.ttl
        trash.extend(survey.refused)
        for file, used_at in survey.locked:
            if now >= used_at + ttl:
                trash.append(file)
            else:
                # What we cannot read still takes room.
                self.locked += 1
                self._index.set_aside(file.cost)
        for found in sorted(survey.found, key=_pinned_then_latest):
            entry = Entry(found.description, min(found.used_at, now), pinned=found.pinned)
            expired = not found.pinned and now >= entry.used_at + ttl
            if expired or not self._index.restore(entry, found.file):
                trash.append(found.file)
        self._empty_trash()

    def save_later(self, entry: Entry) -> None:
        """`save`, in the background."""
        self._background.submit(partial(self.save, entry))

    def save(self, entry: Entry, data: Buffer | None = None) -> bool:
        """Write an entry's file, unless it has one; False when there is no room or the disk fails.

        Args:
            entry: the entry.
            data: its elements, for an entry that is not in memory.
        """
        with self._turn:
            with self._lock:
                data = entry.data if data is None else data
                if entry.gone or entry.file is not None or data is None:
                    return entry.file is not None
                size = self._directory.cost(entry.description)
                if not self._index.reserve_disk(size, entry):
                    entry.memory_only = True
                    return False
                used_at = entry.used_at
            file = self._write(entry, data, used_at)
            if file is None:
                with self._lock:
                    self._index.release_disk(size)
                    entry.memory_only = True
                return False
            with self._lock:
                self.written += 1
                self._index.file(entry, file, used_at)
            if entry.pinned:
                self._save_pin(entry)
            self._empty_trash()
            return True

    def _write(self, entry: Entry, data: Buffer, used_at: float) -> StoredFile | None:
        if not self._empty_trash():
            return None  # what should be gone still takes the room
        try:
            return self._directory.write(entry.description, data, used_at)
        except OSError as error:
            with self._lock:
                self.errors += 1
            _log.warning(
                "a stored prompt of %d bytes cannot be written: %s", len(data), error.strerror
            )
            return None

    def load(self, entry: Entry) -> Buffer | None:
        """Read an entry's elements.

        None when its file was refused or is gone, and the entry with it.

        Raises:
            OverloadedError: the file cannot be read now.
        """
        while True:
            with self._lock:
                file = entry.file
                if entry.data is not None or file is None:
                    return entry.data
            try:
                return self._directory.read(file, entry.description)
            except FileNotFoundError:
                damaged = False
            except DamagedFileError as error:
                damaged = True
                _log.warning("the stored prompt %s is refused and removed: %s", file.name, error)
            except OSError as error:
                self._note_error(file.name, error)
                raise OverloadedError(
                    "the stored prompt cannot be read from disk at the moment",
                    retry_after=RETRY_AFTER,
                ) from error
            with self._lock:
                # Otherwise it lost that file a moment ago, as others needed the room, and may be in
                # memory.
                if entry.file is file:
                    self.refused += damaged
                    self._index.remove(entry)
            self.tidy()

    def delete(self, entry: Entry) -> None:
        """Remove the entry and its file, which is gone for good when this returns.

        Raises:
            OverloadedError: the file cannot be removed; the entry is still there.
        """
        with self._turn:
            with self._lock:
                file = entry.file
            try:
                if file is not None:
                    self._directory.remove(file)
                gone = self._empty_trash()  # where a file it had before may be
                self._directory.sync()
            except OSError as error:
                self._note_error("in the trash" if file is None else file.name, error)
                gone = False
            if not gone:
                raise OverloadedError(
                    "the stored prompt cannot be removed from disk at the moment",
                    retry_after=RETRY_AFTER,
                )
            with self._lock:
                self._index.remove(entry)
            self._empty_trash()

    def save_pin(self, entry: Entry) -> None:
        """Note beside an entry's file whether it is pinned.

        If that fails, it is so until the process ends.
        """
        with self._turn:
            self._save_pin(entry)

    def _save_pin(self, entry: Entry) -> None:
        with self._lock:
            file, pinned = entry.file, entry.pinned
        if file is None:
            return
        try:
            self._directory.set_pinned(file, pinned)
        except OSError as error:
            self._note_error(file.name, error)

    def note_use(self, entry: Entry) -> None:
        """Schedule the note of an entry's last use in its file, if the file is far behind.

        Called under the index's lock.
        """
        behind = entry.used_at - entry.saved_use
        if entry.file is not None and behind > self._index.limits.ttl / NOTES_PER_TTL:
            entry.saved_use = entry.used_at
            self._background.submit(partial(self._save_use, entry))

    def _save_use(self, entry: Entry) -> None:
        with self._lock:
            file, used_at = entry.file, entry.used_at
        if file is None:
            return
        try:
            self._directory.set_used(file, used_at)
        except OSError as error:
            self._note_error(file.name, error)

    def tidy(self) -> None:
        """Schedule the removal of files that the index has dropped."""
        if self._index.trash:
            self._background.submit(self._take_turn_and_tidy)

    def _take_turn_and_tidy(self) -> None:
        with self._turn:
            self._empty_trash()

    def _empty_trash(self) -> bool:
        """Remove the files that the index has dropped.

        False when some could not be, which is tried again later.
        """
        with self._lock:
            files = list(self._index.trash)
            self._index.trash.clear()
        stuck = []
        for file in files:
            try:
                self._directory.remove(file)
            except OSError as error:
                self._note_error(file.name, error)
                stuck.append(file)
        with self._lock:
            self._index.trash.extend(stuck)
        return not stuck

    def _note_error(self, name: str, error: OSError) -> None:
        with self._lock:
            self.errors += 1
        _log.warning(
            "the stored prompt %s cannot be read, changed or removed: %s", name, error.strerror
        )

    def flush(self) -> None:
        """Return when all that was to be done in the background so far is done."""
        self._background.flush()

    def close(self) -> None:
        """Finish background tasks, note the last uses, release the directory."""
        self._background.close()
        with self._turn:
            self._empty_trash()
            for entry in list(self._index.entries):
                self._save_use(entry)
            self._directory.close()


def _pinned_then_latest(found: FoundFile[Description]) -> tuple[bool, float]:
    return not found.pinned, -found.used_at
