"""Pages on disk: runs of records, a file each, sealed as stored prompts are.

A run is some megabytes of pages that were evicted together. Files are encrypted with a key of the
namespace's secret (AES-256-GCM), whole or not there, and checked when they are read; a start finds
them by their headers. The directory is a cache: nothing is synced.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from inlay.engine.torch.pages.copying import RecordShape
from inlay.engine.torch.pages.tier_events import TierEvents
from inlay.messages.digest import BLOCK_DIGEST_SIZE, Secret
from inlay.messages.prompt import Buffer
from inlay.store.directory import Directory
from inlay.store.entry import StoredFile
from inlay.store.file_format import DamagedFileError, FileFormat
from inlay.store.sealing import FileSealer

log = logging.getLogger(__name__)

MAX_RUN = 128
"""Pages of a run at most: their digests have to fit into the header of a file."""
PAUSE_SECONDS = 60.0
"""Seconds for which nothing is written after a write has failed."""


class PageFile(msgspec.Struct, frozen=True, array_like=True):
    """Description of a file.

    Attributes:
        layout: of the records.
        group: page group.
        digests: of the pages, one after the other.
        num_bytes: of the records.
    """

    layout: str
    group: int
    digests: bytes
    num_bytes: int

    @property
    def names(self) -> list[bytes]:
        """Digests of the pages."""
        size = BLOCK_DIGEST_SIZE
        return [self.digests[start : start + size] for start in range(0, len(self.digests), size)]


class PageFileKeys:
    """`inlay.store.file_format.FileKeys` of pages; no stored prompt is one of these files."""

    def __init__(self, secret: Secret) -> None:
        self.file_key = blake3(b"files", key=secret.pages).digest()
        self.fingerprint = bytes.fromhex(secret.fingerprint)
        self.encryption_key = blake3(b"encryption", key=secret.pages).digest()


class DiskPages:
    """Records by group and digest, in files the least recently used of which give way.

    In any thread; `put` in one at a time.

    Attributes:
        num_bytes: of the files.
        num_refused: files that were dropped: torn, changed, of another secret, or another's.
        num_errors: reads, writes and removals that failed.
        events: records what changes, or None.

    Raises:
        InvalidRequestError: the directory cannot be used, or is another's.
    """

    name = "disk"

    def __init__(self, shape: RecordShape, secret: Secret, path: Path, max_bytes: int) -> None:
        self.events: TierEvents | None = None
        keys = PageFileKeys(secret)
        sealed = FileFormat(keys, FileSealer(keys.encryption_key), PageFile)
        self._directory = Directory(
            path, sealed, ending=".pages", noun="run of pages", durable=False
        )
        self._shape = shape
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[str, tuple[StoredFile, PageFile]] = OrderedDict()
        self._places: dict[tuple[int, bytes], tuple[str, int]] = {}
        self._read_last: tuple[str, npt.NDArray[np.uint8]] | None = None
        self._paused_until = 0.0
        self.num_bytes = self.num_refused = self.num_errors = 0
        try:
            self._restore()
        except BaseException:
            self._directory.close()
            raise

    def _restore(self) -> None:
        survey = self._directory.survey()
        # There is one key: one that is locked is as useless as one that is torn.
        unusable = [*survey.refused, *(file for file, _ in survey.locked)]
        self.num_refused = len(unusable)
        for file in unusable:
            self._remove(file)
        for found in sorted(survey.found, key=lambda found: found.used_at):
            self._add(found.file, found.description)
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._places)

    def has(self, group: int, digest: bytes) -> bool:
        """True if there is a record of that name; it may turn out to be damaged."""
        return (group, digest) in self._places

    def names(self) -> list[tuple[int, bytes]]:
        """Group and digest of every record."""
        with self._lock:
            return list(self._places)

    def put(self, group: int, digests: Sequence[bytes], records: Tensor) -> bool:
        """Write sealed records, uint8 [n, record_bytes], as one file; False if that fails."""
        if time.monotonic() < self._paused_until:
            return False
        run = PageFile(self._shape.layout, group, b"".join(digests), records.nbytes)
        cost = self._directory.cost(run)
        if cost > self._max_bytes or not self._make_room(cost):
            return False
        try:
            data = Buffer(records.contiguous().view(-1).numpy().data)
            file = self._directory.write(run, data, time.time())
        except OSError as error:
            self.num_errors += 1
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            log.warning("pages cannot be written for a while: %s", error.strerror)
            return False
        self._add(file, run)
        return True

    def read(self, group: int, digests: Sequence[bytes]) -> Tensor:
        """Return copies of the records of the first `digests`: uint8 [n, record_bytes]. Blocks.

        A file that is not as it was written is dropped.
        """
        found: list[npt.NDArray[np.uint8]] = []
        for digest in digests:
            place = self._places.get((group, digest))
            run = None if place is None else self._run(place[0])
            if place is None or run is None:
                break
            found.append(run[place[1]])
        if not found:  # Torch views no empty array of numpy as wider elements.
            return torch.empty(0, self._shape.record_bytes(group), dtype=torch.uint8)
        # Copied: the memory of a file's records is read-only.
        return torch.from_numpy(np.stack(found))

    def drop(self, group: int, digest: bytes) -> None:
        """Forget a record, with its run."""
        place = self._places.get((group, digest))
        if place is not None:
            self._forget(place[0])

    def clear(self) -> None:
        """Remove all files. Blocks."""
        for name in tuple(self._files):
            self._forget(name)

    def close(self) -> None:
        """Let another engine have the directory; the files stay."""
        self._directory.close()

    def _run(self, name: str) -> "npt.NDArray[np.uint8] | None":
        """Records of a file, uint8 [n, record_bytes]; None if it is gone."""
        last = self._read_last
        if last is not None and last[0] == name:
            return last[1]
        with self._lock:
            file, run = self._files.get(name, (None, None))
            if file is None or run is None:
                return None
            self._files.move_to_end(name)
        try:
            data = self._directory.read(file, run)
        except DamagedFileError as error:
            log.warning("the run of pages %s is refused and removed: %s", name, error)
            self.num_refused += 1
            self._forget(name)
            return None
        except OSError as error:
            self.num_errors += 1
            log.warning("the run of pages %s cannot be read: %s", name, error.strerror)
            self._forget(name)
            return None
        self._note_use(file)
        width = self._shape.record_bytes(run.group)
        records = np.frombuffer(data.view, np.uint8).reshape(-1, width)
        # Pages of a run are asked for one piece after the other.
        self._read_last = name, records
        return records

    def _note_use(self, file: StoredFile) -> None:
        try:
            self._directory.set_used(file, time.time())
        except OSError:
            self.num_errors += 1

    def _add(self, file: StoredFile, run: PageFile) -> None:
        with self._lock:
            self._files[file.name] = file, run
            self.num_bytes += file.cost
            # Of another layout they only take room, until they give way.
            if self._fits(run):
                for index, digest in enumerate(run.names):
                    self._places[run.group, digest] = file.name, index
                    if self.events is not None:
                        self.events.stored(run.group, digest)

    def _fits(self, run: PageFile) -> bool:
        return (
            run.layout == self._shape.layout
            and 0 <= run.group < len(self._shape.sizes)
            and run.num_bytes == len(run.names) * self._shape.record_bytes(run.group)
        )

    def _make_room(self, num_bytes: int) -> bool:
        while self._files and self.num_bytes + num_bytes > self._max_bytes:
            if not self._forget(next(iter(self._files))):
                return False
        return True

    def _forget(self, name: str) -> bool:
        """Remove a file; False if it stays on the disk, and counts."""
        with self._lock:
            file, run = self._files.pop(name, (None, None))
            if file is None or run is None:
                return True
            for digest in run.names:
                if self._places.get((run.group, digest), ("", 0))[0] == name:
                    del self._places[run.group, digest]
                    if self.events is not None:
                        self.events.removed(run.group, digest)
            if self._read_last is not None and self._read_last[0] == name:
                self._read_last = None
        removed = self._remove(file)
        if removed:
            with self._lock:
                self.num_bytes -= file.cost
        return removed

    def _remove(self, file: StoredFile) -> bool:
        try:
            self._directory.remove(file)
        except OSError as error:
            self.num_errors += 1
            log.warning("the run of pages %s cannot be removed: %s", file.name, error.strerror)
            return False
        return True
