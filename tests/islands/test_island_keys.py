"""Keys of islands, as ssh-keygen makes them, and whose messages count."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from ssh_keys import make
from together import a_run

from maxdiloco.errors import ConfigError
from maxdiloco.islands import keys


@pytest.fixture
def two(tmp_path):
    """Folders of islands a and b: a, the first, has both public keys, b its private one alone."""
    for name in "ab":
        (tmp_path / name).mkdir()
    paths = [make(tmp_path / name, name) for name in "ab"]
    (tmp_path / "b" / "b.pub").rename(tmp_path / "a" / "b.pub")
    return paths


def test_the_first_island_names_the_keys_and_the_others_sign_with_theirs(two):
    a, b = map(keys.read, two)
    assert b.of_all == ()
    known = keys.of_run(a, None, "a", "u")
    assert dict(known) == {"a": keys.public(a.own), "b": keys.public(b.own)}
    run = a_run(keys=known)
    assert keys.of_run(b, run, "b", "u") == keys.of_run(a, run, "a", "u") == known
    assert keys.of_run(None, None, "c", "u") == keys.of_run(None, a_run(), "c", "u") == ()


def test_an_island_whose_messages_would_not_count_is_refused(two, tmp_path):
    a, b = map(keys.read, two)
    known = keys.of_run(a, None, "a", "s3://b/r")
    run, other = a_run(keys=known), a_run(keys=(("a", "00"), ("b", "11")))
    for own, stored, name, words in (
        (None, run, "c", "signed messages count alone, and islands_key is not set. Set it to the "
         "private key of c."),
        (b, run, "a", "its islands_key is not that of a in the run's keys (a, b)."),
        (b, None, "b", "the run has no keys."),
        (a, a_run(), "a", "the run has no keys."),
        (a, other, "a", "the run has another key of a."),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            keys.of_run(own, stored, name, "s3://b/r")
        assert str(error.value).startswith(f"island={name}, islands_store=s3://b/r: {words}")


def test_a_file_that_is_no_such_key_is_refused(two, tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text").chmod(0o600)
    elliptic = make(tmp_path / "b", "c", ec.generate_private_key(ec.SECP256R1()))
    for path, words in (
        (str(tmp_path / "none"), "cannot be read: No such file or directory"),
        (str(tmp_path / "text"), "is no key of OpenSSH without a passphrase"),
        (elliptic, "is not ed25519"),
    ):
        with pytest.raises(ConfigError, match=f"^islands_key={path}.*{words}.*`ssh-keygen -t ed"):
            keys.read(path)
