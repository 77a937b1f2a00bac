"""Settings of whoever joins a fleet.

The flags, environment variables and config keys of a connection to NATS.
"""

import re
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator

from inlay.base.errors import InvalidRequestError, why_unusable

_DEFAULT_URL = "nats://127.0.0.1:4222"
_SCHEMES = ("nats", "tls", "ws", "wss")
_BEGINS_CREDENTIALS = b"BEGIN NATS USER JWT"
_namespace = re.compile(r"[A-Za-z0-9_-]{1,32}")


class NatsSettings(BaseModel, frozen=True, defer_build=True):
    """Addresses of NATS, credentials, and the namespace of the fleet."""

    nats: list[SecretStr] = []
    """URLs of NATS servers, nats://[USER:PASSWORD@]HOST:PORT or tls://...; one that answers is
    enough. nats://127.0.0.1:4222 unless set."""
    nats_wait: float = Field(default=2.0, ge=0, le=3600)
    """Seconds to go on trying at the start while nothing listens at the URLs; more where nothing
    restarts this process."""
    nats_user: str | None = Field(default=None, min_length=1)
    """User to log in as, with the password in nats_password_file."""
    nats_password_file: Path | None = None
    """File of the password of nats_user; any characters. It is read again at each connection."""
    nats_creds: Path | None = None
    """File of NATS credentials: a user's JWT and its key."""
    nats_nkey_seed: Path | None = None
    """File of an nkey seed to log in with."""
    nats_tls_ca: Path | None = None
    """Certificates that sign the servers'; the system's unless set."""
    nats_tls_cert: Path | None = None
    """Our own certificate, for servers that ask."""
    nats_tls_key: Path | None = None
    """The key of our own certificate."""
    nats_replicas: int = Field(default=1, ge=1, le=5)
    """Servers of a NATS cluster that each keep cards, the namespace's secret and stored prompts;
    set by the first member, which makes the buckets."""
    namespace: str = "default"
    """Fleet to be part of: letters, digits, _ and -; several share NATS unseen."""

    @field_validator("namespace")
    @classmethod
    def _is_a_token(cls, value: str) -> str:
        if not _namespace.fullmatch(value):
            raise ValueError("a namespace has 1 to 32 letters, digits, _ or -")
        return value

    @field_validator("nats")
    @classmethod
    def _are_urls(cls, value: list[SecretStr]) -> list[SecretStr]:
        for url in value:
            parts = urlsplit(url.get_secret_value())
            if parts.scheme not in _SCHEMES or not parts.hostname:
                raise ValueError(
                    f"a server is nats://HOST:PORT, got {shown(url.get_secret_value())!r}"
                )
        return value

    @property
    def urls(self) -> list[str]:
        """The servers, passwords and all."""
        return [url.get_secret_value() for url in self.nats] or [_DEFAULT_URL]

    @property
    def shown_urls(self) -> str:
        """The servers as they may be printed."""
        return ", ".join(map(shown, self.urls))

    def own_address(self) -> str:
        """Return the IP address of this machine on its way to the first server.

        Raises `InvalidRequestError` where the server's name is not known.
        """
        parts = urlsplit(self.urls[0])
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or 4222, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise InvalidRequestError(
                f"cannot find this machine's address towards {self.shown_urls}: {error}; "
                "give it with --transport-host"
            ) from error

    @property
    def has_login(self) -> bool:
        """True if credentials are given."""
        return bool(self.login()) or any(urlsplit(url).username for url in self.urls)

    def login(self) -> dict[str, str]:
        """Return user and password, and the credential files, by the client's names for them.

        Raises `InvalidRequestError` when a file cannot be read, or one of two is missing.
        """
        if (self.nats_user is None) != (self.nats_password_file is None):
            raise InvalidRequestError("--nats-user and --nats-password-file need each other")
        named: dict[str, str] = {}
        if self.nats_user is not None and self.nats_password_file is not None:
            try:
                password = self.nats_password_file.read_text("utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequestError(
                    f"{self.nats_password_file} cannot be read: {why_unusable(error)}"
                ) from error
            named = {"user": self.nats_user, "password": password}
        given = {"user_credentials": self.nats_creds, "nkeys_seed": self.nats_nkey_seed}
        if self.nats_creds is not None and _BEGINS_CREDENTIALS not in _read(self.nats_creds):
            raise InvalidRequestError(f"{self.nats_creds} has no NATS credentials (.creds)")
        if self.nats_nkey_seed is not None:
            public_key_in(self.nats_nkey_seed)
        return named | {name: str(file) for name, file in given.items() if file is not None}

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None where these settings ask for nothing of their own.

        Raises:
            InvalidRequestError: a file cannot be used.
        """
        if self.nats_tls_ca is None and self.nats_tls_cert is None and self.nats_tls_key is None:
            return None
        if self.nats_tls_key is not None and self.nats_tls_cert is None:
            raise InvalidRequestError("--nats-tls-key needs --nats-tls-cert")
        try:
            context = ssl.create_default_context(cafile=self.nats_tls_ca)
            if self.nats_tls_cert is not None:
                context.load_cert_chain(self.nats_tls_cert, self.nats_tls_key)
        except OSError as error:
            files = (self.nats_tls_ca, self.nats_tls_cert, self.nats_tls_key)
            named = ", ".join(str(file) for file in files if file is not None)
            raise InvalidRequestError(
                f"the certificates for NATS cannot be used ({named}): {why_unusable(error)}"
            ) from error
        return context


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {why_unusable(error)}") from error


def public_key_in(file: Path) -> str:
    """Return the public key of the nkey seed in a file.

    Raises:
        InvalidRequestError: the file cannot be read, or has no seed.
    """
    import nkeys

    try:
        key: str = nkeys.from_seed(_read(file).strip()).public_key.decode()
    except (nkeys.NkeysError, ValueError) as error:
        raise InvalidRequestError(f"{file} has no nkey seed: {error}") from error
    return key


def shown(url: str) -> str:
    """A URL without its user and password; of what is none, what cannot be either of them."""
    parts = urlsplit(url)
    if parts.hostname is None:
        return url.rpartition("@")[2]
    where = parts.hostname
    where = f"[{where}]" if ":" in where else where
    try:
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        port = ""
    return f"{parts.scheme}://{where}{port}" if parts.scheme else where
