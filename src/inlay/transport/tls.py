"""A worker's own TLS certificate: made at its start, signed by itself, named in its card by digest.

No certificate authority is needed: frontends have the digest from the card, which only members of
the namespace can write.
"""

import hashlib
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

_VALID = timedelta(days=3650)


class Identity(NamedTuple):
    """A listener's TLS context and the SHA-256 digest of its certificate (32 bytes)."""

    context: ssl.SSLContext
    fingerprint: bytes


def make_certificate() -> bytes:
    """Make a key (P-256) and a certificate of it, both as PEM."""
    # Not needed where a certificate is only used: the Python of an engine may not have it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "inlay")])
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def load_identity(pem: bytes) -> Identity:
    """Return the identity of a private key and its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as directory:
        # Python's `ssl` reads keys from files alone; the directory is for its owner.
        path = Path(directory, "identity.pem")
        path.write_bytes(pem)
        context.load_cert_chain(path)
    certificate = pem[pem.index(b"-----BEGIN CERTIFICATE-----") :]
    der = ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))
    return Identity(context, hashlib.sha256(der).digest())
