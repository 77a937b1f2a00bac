"""The end of a certificate's validity, read without a library for X.509."""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0


def expiry(pem: str) -> float:
    """Return when the first certificate of `pem` ends, in seconds since 1970.

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
