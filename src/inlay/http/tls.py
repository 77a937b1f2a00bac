"""HTTPS: the server's certificate, and verification of clients' certificates."""

import logging
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

from inlay.base.errors import InvalidRequestError, why_unusable
from inlay.base.watched import WatchedFiles
from inlay.http.settings import FrontendSettings

_log = logging.getLogger(__name__)

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0


class Tls:
    """Certificate of a server, replaceable at run time.

    TLS 1.2 and later, with Python's own ciphers.

    Attributes:
        files: that it is read from, authorities included.
        context: context for new connections.
        expires: end of the certificate, in seconds since 1970; None where it cannot be read.

    Raises:
        InvalidRequestError: a file cannot be used.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        named = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        self.files = WatchedFiles("certificates", [path for path in named if path], self._read)
        self.context = self._made()
        self.expires = self._expiry()

    @classmethod
    def of(cls, settings: FrontendSettings) -> "Tls | None":
        """Return the certificate of `settings`, or None for HTTP. Raises `InvalidRequestError`."""
        return None if settings.ssl_certfile is None else cls(settings)

    def _made(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
        if settings.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(settings.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise InvalidRequestError(
                    f"cannot use {settings.ssl_ca_certs} as certificates of authorities: "
                    f"{_why(error)}",
                    param="ssl_ca_certs",
                ) from error
        elif settings.ssl_cert_reqs:
            raise InvalidRequestError(
                "--ssl-cert-reqs needs --ssl-ca-certs: nothing else says whose certificates "
                "clients may have",
                param="ssl_cert_reqs",
            )
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._settings.ssl_certfile, self._settings.ssl_keyfile
        if certificate is None:
            raise InvalidRequestError("HTTPS needs a certificate", param="ssl_certfile")
        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequestError(
                f"cannot use {certificate} with the key in {key or certificate}: {_why(error)}",
                param="ssl_certfile",
            ) from error

    def _expiry(self) -> float | None:
        certificate = self._settings.ssl_certfile
        try:
            return None if certificate is None else expiry(certificate.read_text("ascii"))
        except (OSError, ValueError, IndexError) as error:
            _log.warning("the end of %s is not known: %s", certificate, error)
            return None

    def _read(self) -> None:
        self.context = self._made()
        self.expires = self._expiry()
        _log.info("certificate read again from %s", self._settings.ssl_certfile)


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or why_unusable(error)


def expiry(pem: str) -> float:
    """Return when the first certificate of `pem` ends, in seconds since 1970.

    Read without a library for X.509.

    Raises:
        ValueError: there is none, or it is no X.509 certificate.
    """
    start, end = pem.find(_BEGIN), pem.find(_END)
    if start < 0 or end < start:
        raise ValueError("there is no certificate")
    certificate = ssl.PEM_cert_to_DER_cert(pem[start : end + len(_END)])
    ((_, whole),) = _elements(certificate)
    _, signed = next(_elements(whole))
    parts = [element for element in _elements(signed) if element[0] != _VERSION]
    # Serial number, algorithm, issuer, validity.
    tag, validity = parts[3]
    times = list(_elements(validity))
    if tag != _SEQUENCE or len(times) != 2:
        raise ValueError("the certificate has no validity")
    kind, text = times[1]
    formats = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
    if kind not in formats:
        raise ValueError("the certificate's end is no time")
    return datetime.strptime(text.decode("ascii"), formats[kind]).replace(tzinfo=UTC).timestamp()


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each DER element; raises `ValueError` where `data` ends before one."""
    at = 0
    while at < len(data):
        if at + 2 > len(data):
            raise ValueError("the certificate is cut short")
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(data[at : at + count], "big")
            at += count
        if at + length > len(data):
            raise ValueError("the certificate is cut short")
        yield tag, data[at : at + length]
        at += length
