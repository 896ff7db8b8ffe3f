"""Rule 12: Ed25519 signatures of messages and heartbeats, for runs whose run.json has keys."""

import os
import pathlib
from typing import NamedTuple, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from maxdiloco import small_files
from maxdiloco.errors import ConfigError
from maxdiloco.islands import records
from maxdiloco.islands.records import Heartbeat, Message, Run

_REMEDY = "`ssh-keygen -t ed25519 -N '' -f NAME` makes NAME and NAME.pub."

Signed = TypeVar("Signed", Message, Heartbeat)
PublicKeys = tuple[tuple[str, str], ...]  # (island, key), as in run.json


class Keys(NamedTuple):
    """The private key of an island, 32 bytes, and the public keys that it knows."""

    own: bytes
    of_all: PublicKeys


def read(path: str) -> Keys:
    """Read a private key of OpenSSH, and each NAME.pub in its folder.

    Raises:
      ConfigError: a file cannot be read, or is not an Ed25519 key.
    """
    file = pathlib.Path(os.path.expanduser(path))
    try:
        own = serialization.load_ssh_private_key(small_files.read_secret(file), None)
        if not isinstance(own, ed25519.Ed25519PrivateKey):
            raise TypeError("it is not ed25519")
        of_all = tuple(map(_read_public, sorted(file.parent.glob("*.pub"))))
    except OSError as error:
        raise ConfigError(
            f"islands_key={path}: {error.filename} cannot be read: {error.strerror}. {_REMEDY}"
        ) from error
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"islands_key={path}: it, or a .pub in its folder, is not an ed25519 key of OpenSSH "
            f"without a passphrase ({error}). {_REMEDY}"
        ) from error
    return Keys(own.private_bytes_raw(), of_all)


def _read_public(file: pathlib.Path) -> tuple[str, str]:
    """Return the island of a public key, and the key in the form of run.json."""
    text = small_files.read_bytes(file, small_files.SECRET_BYTES)
    key = serialization.load_ssh_public_key(text)
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise TypeError(f"{file.name} is not ed25519")
    return file.stem, key.public_bytes_raw().hex()


def of_run(keys: Keys | None, stored: Run | None, name: str, url: str) -> PublicKeys:
    """Return the public keys of run.json: the stored ones, or this island's if it begins the run.

    Args:
      keys: keys of this island; None: it does not sign.
      stored: run.json of the store; None: this island begins the run.
      name: name of this island.
      url: URL of the store.

    Raises:
      ConfigError: the messages of this island would not count.
    """
    first = stored is None
    known = dict((keys.of_all if keys else ()) if first else stored.keys)
    if keys is None and not known:
        return ()
    where = f"island_name={name}, islands_store={url}: "
    if keys is None:
        raise ConfigError(
            f"{where}only signed messages count, and islands_key is not set. Set it to the "
            f"private key of {name}."
        )
    other = [each for each, key in keys.of_all if known.get(each) != key]
    if not known or other:
        raise ConfigError(
            f"{where}the run has {'another key of ' + other[0] if known else 'no keys'}. Put the "
            ".pub files of that run next to islands_key, or use another islands_store."
        )
    if known.get(name) != public(keys.own):
        raise ConfigError(
            f"{where}its islands_key does not belong to {name} in the run's keys "
            f"({', '.join(known)}). The first island needs each NAME.pub next to its "
            "islands_key; set it to the private key of this name."
        )
    return tuple(sorted(known.items()))


def public(key: bytes) -> str:
    """Return the public key of a private key, in the form of run.json."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(key)
    return private.public_key().public_bytes_raw().hex()


def signed(value: Signed, key: bytes | None) -> Signed:
    """Sign a message or a heartbeat. The signed header contains the payload's sha256.

    key: private key of 32 bytes; None: the value is returned without a signature.
    """
    if key is None:
        return value
    private = ed25519.Ed25519PrivateKey.from_private_bytes(key)
    return value._replace(signature=private.sign(_text(value)).hex())


def is_trusted(run: Run, value: Message | Heartbeat) -> bool:
    """Return whether the key of the value's island has signed it. True for a run without keys."""
    if not run.keys:
        return True
    try:
        key = bytes.fromhex(dict(run.keys)[value.island])
        signature = bytes.fromhex(value.signature)
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, _text(value))
    except (KeyError, ValueError, InvalidSignature):
        return False
    return True


def _text(value: Message | Heartbeat) -> bytes:
    return records.encode(value._replace(signature=""))
