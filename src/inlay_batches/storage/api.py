"""Storage of records, changed by compare-and-set alone, and of contents, written once."""

from typing import BinaryIO, Protocol


class Storage(Protocol):
    """`inlay.store.shared.Shared` is one, which says what the methods do.

    A key has two parts with a dot between: the owner's digest and the id. All methods raise
    `OverloadedError` where the storage does not do what is asked now, or has no room.
    """

    async def find(self, key: str) -> tuple[int, bytes | None]:
        """Return (revision, record) of a key; the record is None where there is none."""

    async def swap(self, key: str, record: bytes, revision: int) -> bool:
        """Put a record in the place of the one of `revision`; False when another was first."""

    async def drop(self, key: str, revision: int) -> bool:
        """Remove the record of `revision`; False when another was first."""

    async def list(self, under: str = "*") -> "list[tuple[str, int, bytes]]":
        """Return (key, revision, record) of every key under an owner, or of all."""

    async def write(self, name: str, file: BinaryIO) -> int:
        """Keep a content under a new name; its bytes."""

    async def read(self, name: str, size: int, file: BinaryIO) -> bool:
        """Copy a content of `size` bytes to a file; False where it is not whole."""

    async def erase(self, name: str) -> None:
        """Remove a content, or what there is of it."""

    async def contents(self) -> set[str]:
        """Return the names of all contents."""

    async def size(self) -> tuple[int, int]:
        """Return the bytes of all contents, and how many records there are."""
