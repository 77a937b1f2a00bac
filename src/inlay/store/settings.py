"""Settings of the store.

The flags, environment variables and config keys of what outlives a request.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from inlay.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from inlay.messages.digest import Secret
    from inlay.store.fleet import FleetStore
    from inlay.store.shared import Shared
    from inlay.store.store import PromptStore

MIB = 1024 * 1024


class StoreSettings(BaseModel, frozen=True, defer_build=True):
    """Bounds, location and lifetime of uploaded prompts."""

    prompt_store_memory_bytes: int = Field(default=256 * MIB, ge=0)
    """Memory for uploaded embeddings at most."""
    prompt_store_dir: Path | None = None
    """Directory that uploaded embeddings are also written to, so that they outlive the process;
    needs state_dir or secret_file. Memory alone unless set."""
    prompt_store_disk_bytes: int = Field(default=10 * 1024 * MIB, ge=MIB)
    """Bytes of files in prompt_store_dir at most."""
    prompt_store_ttl: float = Field(default=24 * 3600, gt=0)
    """Seconds uploaded embeddings are kept after their last use."""
    prompt_store_tenant_bytes: int | None = Field(default=None, ge=0)
    """Bytes one API key may keep uploaded, in memory and on disk together; the whole store unless
    set."""
    prompt_store_key_file: Path | None = None
    """File of a 32-byte key that uploaded embeddings are encrypted with (AES-256-GCM) where they
    are kept outside of memory; the same for all frontends of a fleet."""
    state_dir: Path | None = None
    """Directory of what must outlive the process: the secret from which references and digests are
    made."""
    secret_file: Path | None = None
    """File of that 32-byte secret, instead of one made and kept in state_dir."""

    def secret(self) -> "Secret":
        """The root secret these settings name, or one that lives as long as the process.

        Raises:
            InvalidRequestError: as `inlay.store.load_secret`.
        """
        from inlay.store.secret import load_secret

        return load_secret(file=self.secret_file, state_dir=self.state_dir)

    def open(self, secret: "Secret") -> "PromptStore":
        """The store these settings describe.

        Raises:
            InvalidRequestError: as `PromptStore`; or a directory without a secret that outlives the
                process: the next start would find no file of its own there, and remove them all.
        """
        if (
            self.prompt_store_dir is not None
            and self.state_dir is None
            and self.secret_file is None
        ):
            raise InvalidRequestError(
                "--prompt-store-dir needs --state-dir or --secret-file: what is stored is bound to "
                "a secret that must be the same after a restart",
                param="prompt_store_dir",
            )
        if self.prompt_store_key_file is not None and self.prompt_store_dir is None:
            raise InvalidRequestError(
                "--prompt-store-key-file encrypts the files of --prompt-store-dir, which is not "
                "set",
                param="prompt_store_key_file",
            )
        return self._own(secret, self.prompt_store_tenant_bytes)

    def _own(self, secret: "Secret", tenant_bytes: int | None) -> "PromptStore":
        from inlay.store.store import PromptStore

        directory = self.prompt_store_dir
        return PromptStore(
            secret,
            memory_bytes=self.prompt_store_memory_bytes,
            ttl=self.prompt_store_ttl,
            directory=directory,
            disk_bytes=0 if directory is None else self.prompt_store_disk_bytes,
            max_per_tenant_bytes=tenant_bytes,
            encryption_key=self._key(),
        )

    def _key(self) -> bytes | None:
        from inlay.store.secret import read_key

        return None if self.prompt_store_key_file is None else read_key(self.prompt_store_key_file)


class BatchSettings(BaseModel, frozen=True, defer_build=True):
    """Location and bounds of files of clients, and of batches of requests in them."""

    batch_store: str = "off"
    """Serve /v1/files and /v1/batches, and keep them in memory, in the NATS of the fleet (nats), or
    in a directory, which may be that of several frontends of one machine."""
    batch_store_bytes: int = Field(default=10 * 1024 * MIB, ge=MIB)
    """Bytes of all files and of what batches have made at most; in memory 256 MiB at most."""
    batch_store_key_file: Path | None = None
    """File of a 32-byte key that files are encrypted with (AES-256-GCM) outside of memory; the same
    for all frontends of a fleet."""
    max_file_bytes: int = Field(default=200 * MIB, ge=1024)
    """Bytes of one uploaded file at most. max_body_bytes does not apply to it, but to each line."""
    files_tenant_bytes: int | None = Field(default=None, ge=1024)
    """Bytes of all files of one API key at most; the whole store unless set."""
    files_ttl: float = Field(default=30 * 24 * 3600, gt=0)
    """Seconds that a file is kept unless its upload says otherwise, and that an ended batch is."""
    max_batch_lines: int = Field(default=1_000_000, ge=1)
    """Lines of one batch at most."""
    max_batches_per_tenant: int = Field(default=16, ge=1)
    """Batches of one API key that may be under way."""
    batch_max_inflight: int = Field(default=128, ge=1)
    """Lines of one batch that are under way at most."""


class ResponseSettings(BaseModel, frozen=True, defer_build=True):
    """Location and bounds of responses and conversations that clients go on with."""

    response_store: str = "off"
    """Keep responses with their input, and conversations: in memory, in the NATS of the fleet
    (nats), or in a directory, which may be that of several frontends of one machine."""
    response_store_bytes: int = Field(default=1024 * MIB, ge=MIB)
    """Bytes of all of them at most; in memory 256 MiB at most. Each frontend counts what others
    keep once a minute."""
    response_store_key_file: Path | None = None
    """File of a 32-byte key that they are encrypted with (AES-256-GCM) outside of memory; the same
    for all frontends of a fleet."""
    responses_tenant_bytes: int | None = Field(default=None, ge=1024)
    """Bytes of all responses and conversations of one API key at most; the whole store unless
    set."""
    response_ttl: float = Field(default=24 * 3600, gt=0)
    """Seconds that a response is kept, and a conversation after its last change."""
    max_background_responses: int = Field(default=64, ge=1)
    """Background responses of one API key that may be under way."""


class FleetStoreSettings(StoreSettings, frozen=True):
    """The same for a frontend of a fleet."""

    prompt_store_nats: bool = True
    """Keep uploaded embeddings in NATS, so that every frontend serves every reference; memory, and
    the directory if there is one, are caches then. Otherwise each stays at its frontend."""
    prompt_store_nats_bytes: int = Field(default=10 * 1024 * MIB, ge=MIB)
    """Bytes of uploaded embeddings in NATS at most."""

    def open_shared(self, secret: "Secret", shared: "Shared") -> "FleetStore":
        """The store these settings describe, over a fleet's storage.

        Raises:
            InvalidRequestError: as `PromptStore`, or a bad key.
        """
        from inlay.store.fleet import FleetStore
        from inlay.store.space import FleetLimits

        return FleetStore(
            secret,
            shared,
            # A tenant's quota is of the fleet's storage.
            self._own(secret, None),
            FleetLimits(
                max_bytes=self.prompt_store_nats_bytes,
                max_per_tenant_bytes=self.prompt_store_tenant_bytes,
                ttl=self.prompt_store_ttl,
            ),
            encryption_key=self._key(),
        )
