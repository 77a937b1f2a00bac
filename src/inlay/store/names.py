"""The names a store gives.

Ids that cannot be guessed or forged, tenants that cannot be read back.
"""

import struct
from base64 import b32encode
from typing import TypeAlias

from blake3 import blake3

from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer

ID_PREFIXES = {"embeds": "pe-", "image": "pe-", "vectors": "pv-"}
"""Beginnings of ids, by the kind of the content."""
ID_PATTERN = rf"(?:{'|'.join(sorted({*ID_PREFIXES.values()}))})[a-z2-7]{{32}}"
"""Regular expression of an id, of every kind."""
ID_DIGEST_SIZE = 20
TENANT_DIGEST_SIZE = 16

Key: TypeAlias = tuple[bytes, str]
"""(digest of the tenant, id).

What an entry is found by, so that a stranger's id is as absent as one never given.
"""

_length = struct.Struct("<Q")


class Names:
    """Keyed digests of tenants and contents.

    Attributes:
        file_key: 32 bytes that authenticate the store's files.
        fingerprint: 8 bytes that tell two secrets apart and reveal neither.
    """

    __slots__ = ("_id_keys", "_tenant_key", "file_key", "fingerprint")

    def __init__(self, secret: Secret) -> None:
        self._id_keys = {
            "embeds": blake3(b"ids", key=secret.store).digest(),
            "image": blake3(b"image ids", key=secret.store).digest(),
            "vectors": blake3(b"vectors ids", key=secret.store).digest(),
        }
        self._tenant_key = blake3(b"tenants", key=secret.store).digest()
        self.file_key = blake3(b"files", key=secret.store).digest()
        self.fingerprint = bytes.fromhex(secret.fingerprint)

    def id(self, tenant: str, data: Buffer, kind: str = "embeds") -> str:
        """`pe-`, or `pv-` of vectors, and 32 characters.

        The id of the file `data` for `tenant`, a keyed 160-bit BLAKE3 of both. The same bytes
        have an id of their own as each kind.
        """
        name = tenant.encode()
        hasher = blake3(_length.pack(len(name)) + name, key=self._id_keys[kind])
        hasher.update(data.view)
        return ID_PREFIXES[kind] + b32encode(hasher.digest(ID_DIGEST_SIZE)).decode().lower()

    def key(self, tenant: str, id_: str) -> Key:
        """Key of the entry `id_` of `tenant`."""
        return blake3(tenant.encode(), key=self._tenant_key).digest(TENANT_DIGEST_SIZE), id_
