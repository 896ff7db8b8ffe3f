"""The authority that all processes derive from one secret, and the files of a process's key."""

import hashlib
import hmac
import pathlib
import signal
import stat

import jax
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from messenger_tools import WAIT_S, until

from maxdiloco.cluster import certificates, peers
from maxdiloco.errors import ConfigError

SECRET = b"known to every host of the run"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def hkdf(secret, info, size):
    """RFC 5869 with SHA-256 and no salt, written out."""
    key, block, found = hmac.digest(bytes(32), secret, "sha256"), b"", b""
    for counter in range(1, -(-size // 32) + 1):
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        found += block
    return found[:size]


def test_the_authority_follows_from_the_secret_alone():
    """The key is HKDF's output modulo the order of P-256 (SEC 2, 2.4.2), and never zero."""
    order = int("FFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551", 16)
    seed = int.from_bytes(hkdf(SECRET, b"maxdiloco certificate authority", 48), "big")
    key = certificates.authority_key(SECRET)
    assert isinstance(key.curve, ec.SECP256R1)
    assert key.private_numbers().private_value == seed % (order - 1) + 1
    public = key.public_key().public_numbers()
    compressed = bytes([2 + public.y % 2]) + public.x.to_bytes(32, "big")
    assert certificates.fingerprint(key) == hashlib.sha256(compressed).hexdigest()
    assert (
        certificates.fingerprint(certificates.authority_key(SECRET + b"x"))
        != hashlib.sha256(compressed).hexdigest()
    )
    with pytest.raises(ValueError, match="15"):
        certificates.authority_key(b"x" * 15)


def test_key_files_are_private_and_removed():
    with certificates.key_files(certificates.authority_key(SECRET), "process-3") as keys:
        paths = [pathlib.Path(path) for path in keys]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
        certificate = x509.load_pem_x509_certificate(paths[1].read_bytes())
        authority = x509.load_pem_x509_certificate(paths[0].read_bytes())
        certificate.verify_directly_issued_by(authority)
    assert not paths[0].parent.exists()


def test_a_certificate_holds_whatever_the_clock_shows():
    """A clock that is off by an hour, or by years, refuses no process."""
    with certificates.key_files(certificates.authority_key(SECRET), "process-3") as keys:
        for path in (keys.authority, keys.certificate):
            found = x509.load_pem_x509_certificate(pathlib.Path(path).read_bytes())
            assert (
                found.not_valid_before_utc.year == 1970 and found.not_valid_after_utc.year == 9999
            )


HOLD = """
import os, sys, time
from maxdiloco.cluster import certificates
with certificates.key_files(certificates.authority_key(b"s" * 16), "process-3") as keys:
    print(keys.key, flush=True)
    if sys.argv[1] == "exit":
        os._exit(5)
    time.sleep(100)
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_key_files_are_removed_however_the_process_ends(started, end):
    """By os._exit, as when a peer is lost, and by SIGKILL."""
    process = started(HOLD, end)
    path = pathlib.Path(process.stdout.readline().strip())
    assert path.name == "key.pem"
    if end == "kill":
        assert path.exists()
        process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)
    until(lambda: not path.parent.exists())


def test_jax_gets_the_certificates_if_it_can_use_them(monkeypatch, secret_file):
    """From 0.12 on. Without a secret file the authority is not known before JAX has started."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda mtls_cert_file=None: None)
    with peers.tls_of_jax("") as none, peers.tls_of_jax(str(secret_file)) as found:
        assert none == {}
        assert found.pop("mtls_peer_uri_prefix").endswith("/")
        assert {pathlib.Path(path).name: name for name, path in found.items()} == {
            "authority.pem": "mtls_ca_file",
            "certificate.pem": "mtls_cert_file",
            "key.pem": "mtls_key_file",
        }
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    with peers.tls_of_jax(str(secret_file)) as found:
        assert found == {}


def test_a_secret_file_that_others_can_read_is_refused(secret_file):
    """Control: the same file with mode 600."""
    assert peers.secret_of_file(str(secret_file)) == SECRET
    for mode in (0o640, 0o604, 0o620):
        secret_file.chmod(mode)
        with pytest.raises(ConfigError, match=f"exchange_secret_file={secret_file}.* {mode:03o}"):
            peers.secret_of_file(str(secret_file))
