"""Keys of islands, as ssh-keygen makes them, and whose messages count."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from ssh_keys import make
from together import a_run

from maxdiloco.errors import ConfigError
from maxdiloco.islands import signatures


@pytest.fixture
def two(tmp_path):
    """Folders of islands a and b: a, the first, has both public keys, b its private one alone."""
    for name in "ab":
        (tmp_path / name).mkdir()
    paths = [make(tmp_path / name, name) for name in "ab"]
    (tmp_path / "b" / "b.pub").rename(tmp_path / "a" / "b.pub")
    return paths


def test_the_first_island_names_the_keys_of_all(two):
    a, b = map(signatures.read, two)
    assert b.of_all == ()
    known = signatures.of_run(a, None, "a", "u")
    assert dict(known) == {"a": signatures.public(a.own), "b": signatures.public(b.own)}
    run = a_run(keys=known)
    assert signatures.of_run(b, run, "b", "u") == signatures.of_run(a, run, "a", "u") == known
    assert (
        signatures.of_run(None, None, "c", "u") == signatures.of_run(None, a_run(), "c", "u") == ()
    )


def test_an_island_whose_messages_would_not_count_is_refused(two, tmp_path):
    a, b = map(signatures.read, two)
    known = signatures.of_run(a, None, "a", "s3://b/r")
    run, other = a_run(keys=known), a_run(keys=(("a", "00"), ("b", "11")))
    for own, stored, name in (
        (None, run, "c"), (b, run, "a"), (b, None, "b"), (a, a_run(), "a"), (a, other, "a")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^island_name={name}, islands_store=s3://b/r: "):
            signatures.of_run(own, stored, name, "s3://b/r")


def test_a_file_that_is_not_an_ed25519_key_is_named(two, tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text").chmod(0o600)
    elliptic = make(tmp_path / "b", "c", ec.generate_private_key(ec.SECP256R1()))
    for path in (tmp_path / "none", tmp_path / "text", elliptic):
        with pytest.raises(ConfigError, match=f"^islands_key={path}: "):
            signatures.read(str(path))
