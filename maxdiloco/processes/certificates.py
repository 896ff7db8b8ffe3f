"""Who is who between the processes of a run: a certificate each, made at the start and pinned.

A process tells the others its address and certificate by a store of texts, signed with the secret
of the run. A connection is TLS 1.3 in which both sides show the certificate that the other one has
read there, so whoever lacks the private key of a process of this run gets no further. No JAX.
"""

import datetime
import hmac
import json
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from maxdiloco import json_text
from maxdiloco.errors import ConfigError, LostPeerError

LEAST_SECRET = 16  # bytes; our choice
OTHERS_WRITE = "Keep the coordinator's port from all but the hosts of the run."


class Peer(NamedTuple):
    """A process of the run, as the others know it.

    host: "" where it is the coordinator's. name: of its machine, for messages. certificate: PEM.
    """

    host: str
    port: int
    name: str
    certificate: str


class Identity(NamedTuple):
    """What one process proves itself with: PEM."""

    key: bytes
    certificate: bytes

    def context(self, side: int) -> ssl.SSLContext:
        """That shows the certificate and trusts no one yet. side: PROTOCOL_TLS_SERVER, _CLIENT."""
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        with tempfile.NamedTemporaryFile() as file:  # ssl reads keys from files alone
            Path(file.name).write_bytes(self.key + self.certificate)
            context.load_cert_chain(file.name)
        return context


def make_identity() -> Identity:
    """A new key and its certificate, which holds whatever the clocks of hosts say."""
    key, serial = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
    # Of its own: OpenSSL looks for a trusted certificate by its name, and takes the first.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"maxdiloco {serial}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 1, 1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Identity(key.private_bytes(pem, *private), certificate.public_bytes(pem))


def tell(rank: int, peer: Peer, secret: bytes, put: Callable[[str, str], None]) -> None:
    """Put into the store who process `rank` is."""
    put(f"maxdiloco/peer/{rank}", json.dumps([*peer, _proof(rank, peer, secret)]))


def tell_problem(rank: int, problem: str, put: Callable[[str, str], None]) -> None:
    """Put into the store, in its place, why process `rank` will not come."""
    put(f"maxdiloco/peer/{rank}", json.dumps([problem]))


def told(rank: int, secret: bytes, get: Callable[[str], str]) -> Peer:
    """Who process `rank` is. get: waits until the key is there, or raises an error of its own.

    Raises LostPeerError where somebody else has written to the store, or it will not come.
    """
    text = get(f"maxdiloco/peer/{rank}")
    try:
        *fields, proof = json_text.parse(text)
        if not fields and isinstance(proof, str):
            line = f"process {rank} has ended: {proof}"
            raise LostPeerError(line, ConfigError.exit_code)
        peer = Peer(*fields)
        right = [type(field) for field in fields] == [str, int, str, str]
        right = right and hmac.compare_digest(str(proof), _proof(rank, peer, secret))
    except (ValueError, TypeError):
        right = False
    if not right:
        raise LostPeerError(
            f"JAX's key-value store holds nothing that process {rank} of this run wrote, but "
            f"{text[:60]!r}. Give all processes the same exchange_secret_file. {OTHERS_WRITE}"
        )
    return peer


def _proof(rank: int, peer: Peer, secret: bytes) -> str:
    if len(secret) < LEAST_SECRET:
        raise ValueError(f"a secret of {len(secret)} bytes: {LEAST_SECRET} are the least")
    return hmac.digest(secret, json.dumps([rank, *peer]).encode(), "sha256").hex()
