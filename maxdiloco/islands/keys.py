"""Ed25519 signatures of islands, where run.json names their keys. Rule 13."""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519

from maxdiloco.islands import records
from maxdiloco.islands.records import Message, Run


def public(key: bytes) -> str:
    """The public key, as run.json has it, of a private one of 32 bytes."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(key)
    return private.public_key().public_bytes_raw().hex()


def signed(message: Message, key: bytes) -> Message:
    """The message with the signature of its header, which has the sha256 of its payload."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(key)
    return message._replace(signature=private.sign(_text(message)).hex())


def is_known(run: Run, message: Message) -> bool:
    """Whether a message counts: its island's key has signed it, or the run has no keys."""
    if not run.keys:
        return True
    try:
        key = bytes.fromhex(dict(run.keys)[message.island])
        signature = bytes.fromhex(message.signature)
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, _text(message))
    except (KeyError, ValueError, InvalidSignature):
        return False
    return True


def _text(message: Message) -> bytes:
    return records.encode(message._replace(signature=""))
