"""Certificates with which the processes of a run authenticate to each other.

Every process derives the same certificate authority from the secret of the run, and issues a
certificate to itself when it starts. A connection is TLS 1.3 in which both sides show a certificate
of the authority, so a client without the secret cannot connect.
"""

import datetime
import os
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

SECRET_BYTES = 16  # least size of a secret: 128 bits, the strength of P-256
# Prefix of the URI in every certificate. JAX's coordination service accepts only clients with it.
URI_PREFIX = "maxdiloco://process/"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256's group
# At least 64 bits more than the order, so that all keys are equally likely: FIPS 186-5, A.2.1.
_SEED_BYTES = 48
# Valid at any time, since the clocks of hosts may be wrong. The end means never: RFC 5280, 4.1.2.5.
_FROM, _UNTIL = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)


class KeyFiles(NamedTuple):
    """Paths of PEM files: the authority, this process's certificate, and its private key."""

    authority: str
    certificate: str
    key: str

    def context(self, side: int) -> ssl.SSLContext:
        """Return a TLS context that trusts only the authority. side: an ssl.PROTOCOL_TLS_..."""
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        return context


def name_of(process: int) -> str:
    """Return the DNS name in the certificate of a process."""
    return f"process-{process}.maxdiloco.internal"


def subject(certificate: Mapping[str, Any] | None) -> str:
    """Return the DNS name in a certificate, as ssl decodes it; "" without a certificate."""
    names = dict(certificate.get("subjectAltName", ())) if certificate else {}
    return names.get("DNS", "")


def authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """Derive the authority's private key from the secret of the run.

    Raises:
      ValueError: the secret has less than SECRET_BYTES.
    """
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes: expected at least {SECRET_BYTES}.")
    info = b"maxdiloco certificate authority"
    seed = HKDF(hashes.SHA256(), _SEED_BYTES, salt=None, info=info).derive(secret)
    number = int.from_bytes(seed, "big") % (_ORDER - 1) + 1
    return ec.derive_private_key(number, ec.SECP256R1())


def fingerprint(authority: ec.EllipticCurvePrivateKey) -> str:
    """Return a digest of the authority's public key, in hexadecimal digits."""
    encoding, form = serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    digest = hashes.Hash(hashes.SHA256())
    digest.update(authority.public_key().public_bytes(encoding, form))
    return digest.finalize().hex()


@contextmanager
def key_files(authority: ec.EllipticCurvePrivateKey, name: str) -> Iterator[KeyFiles]:
    """Issue a certificate with this DNS name, in files that only this user can read.

    The folder has mode 700 and each file 600. They are removed at the end of the `with`. If this
    process is killed, a shell removes them: it waits for the end of its input.
    """
    folder = tempfile.mkdtemp(prefix="maxdiloco-")
    remover = subprocess.Popen(
        ["/bin/sh", "-c", 'cat >/dev/null; rm -rf -- "$0"', folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not reach the shell
    )
    try:
        key = ec.generate_private_key(ec.SECP256R1())
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = serialization.Encoding.PEM
        contents = KeyFiles(
            authority=_certificate("authority", authority, authority),
            certificate=_certificate(name, key, authority),
            key=key.private_bytes(pem, *private),
        )
        paths = KeyFiles(*(os.path.join(folder, f"{name}.pem") for name in KeyFiles._fields))
        for path, content in zip(paths, contents, strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
        yield paths
    finally:
        remover.stdin.close()
        remover.wait()


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, authority: ec.EllipticCurvePrivateKey
) -> bytes:
    """Return a certificate of the authority for a key, in PEM; self-signed for its own key."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=key is authority, path_length=None), critical=True)
    )
    if key is not authority:
        names = [x509.DNSName(name), x509.UniformResourceIdentifier(f"{URI_PREFIX}{name}")]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signed = builder.sign(authority, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)
