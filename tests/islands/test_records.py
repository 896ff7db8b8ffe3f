"""The bytes of a log's objects: golden, bounded, versioned, and nothing else is read."""

import json

import pytest

from maxdiloco.islands import records
from maxdiloco.islands.records import (
    Block,
    Damaged,
    Gradient,
    Heartbeat,
    Leaf,
    Lease,
    LogState,
    Member,
    Message,
    Range,
    Record,
    Reject,
    Run,
    Watermark,
)  # fmt: skip

PART = Range(3, 1, 0, 64)
RUN = Run(
    (("model", "m"),), "int8", "float32", "radial_directional_mean", "nesterov", 0.7, 0.6,
    ((Leaf(4, 2), Leaf(3, 0)),), 1, 30, 2, 0.5, 1000, 64, 0, 64, (("a", "ff"),),
    12,
)  # fmt: skip
EXAMPLES = {
    "run.json": (RUN, b""),
    "u/0/a.1.2": (
        Message(0, "a", 1, 2, 7, 10, 64, 128, (PART,), 0.5, True, records.sha256(b"xy"), 2.5),
        b"xy"),
    "c/0/8": (
        Record(0, 8, "a", "1.0", (Member("a", 1, 2, 409.6, 10, 64, 0.5, (PART,), 2.5),),
               (Reject("b", 1, 1, "stale", 3, 2.0),), (("c", 2),), 0.75, "p", "s", "g"), b""),
    "g/0/8.a.1.0": (Gradient(0, 8, records.sha256(b"z")), b"z"),
    "s/0/8": (
        LogState(0, 8, "l", "s", 512, (Watermark("a", 1, 2, 512, 1, 1, 2.5),), ((0.5, 10),),
               (("c", 2),), (Block(3, 1, "a", 1, 64, 60),), 3, (1, 2)), b"\0" * 8),
    "hb/a": (Heartbeat("a", 1, 9, (2, 1), 12.5, False), b""),
    "i/a/1": (Lease("i/a/1", "a", 1, "n"), b""),
}  # fmt: skip
GOLDEN = {
    "run.json": "bff540d184cfd1c4",
    "u/0/a.1.2": "83bd9a570ba0ff63",
    "c/0/8": "a231e331df6b2d33",
    "g/0/8.a.1.0": "f7f6d908087a9ebb",
    "s/0/8": "1f26a31e1fca60c4",
    "hb/a": "1bab9c4ad8884290",
    "i/a/1": "709147b4a82bd426",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_object_comes_back_from_golden_bytes(name):
    value, payload = EXAMPLES[name]
    data = records.encode(value, payload)
    assert records.decode(name, data) == (value, payload)
    assert records.sha256(data)[:16] == GOLDEN[name]


def test_the_bytes_of_a_sign_of_life():
    """The format in full, where it is short."""
    line = (
        b'{"island":"a","incarnation":1,"count":9,"sent":[2,1],"speed":12.5,"left":false,'
        b'"signature":""}\n'
    )
    assert records.encode(EXAMPLES["hb/a"][0]) == b"maxdiloco-islands 8 heartbeat\n" + line


def test_a_header_is_read_from_the_first_bytes():
    value, _ = EXAMPLES["u/0/a.1.2"]
    data = records.encode(value, b"xy")
    assert records.decode("u/0/a.1.2", data[:-1], whole=False) == (value, b"x")
    with pytest.raises(Damaged, match="u/0/a.1.2 .*sha256"):
        records.decode("u/0/a.1.2", data[:-1])


def with_field(field, value):
    """The bytes of a message with another value of a field."""
    message, payload = EXAMPLES["u/0/a.1.2"]
    text = json.dumps({**json.loads(records.encode(message).split(b"\n")[1]), field: value})
    return b"maxdiloco-islands 8 message\n" + text.replace(" ", "").encode() + b"\n" + payload


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"maxdiloco-islands 9 message\n{}\n", "format 9"),
        (b"maxdiloco-islands 1 message\n{}\n", "format 1"),
        (b"\x80\x04cos\nsystem\n", ""),
        (b"", ""),
        (records.encode(EXAMPLES["hb/a"][0]), "heartbeat"),
        (records.encode(EXAMPLES["u/0/a.1.2"][0])[:-3], ""),
        (with_field("seq", -1), "'-1'"),
        (with_field("seq", 2**63), str(2**63)),
        (with_field("seq", True), "'True'"),
        (with_field("norm", float("nan")), "nan"),
        (with_field("island", "../a"), "'../a'"),
        (with_field("sha256", "f" * 257), "fff"),
        (with_field("data", [[1, 1, 0, 1]]), "block, lease, start, stop"),
        (with_field("more", 1), "fragment, island"),
        (with_field("data", 3), "'3'"),
        (with_field("seq", 2).replace(b'"seq":2', b'"seq":2.0'), "'2.0'"),
        (with_field("seq", 2).replace(b'"seq":2', b'"seq": 2'), ""),
        (b"maxdiloco-islands 8 message\n" + b"[" * 10**5 + b"\n", ""),
    ],
)
def test_bytes_that_are_not_a_message_are_refused(data, named):
    with pytest.raises(Damaged, match=r"u/0/a\.1\.2 ") as error:
        records.decode("u/0/a.1.2", data)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_only_what_has_a_payload_may_have_more_bytes():
    with pytest.raises(Damaged, match="hb/a "):
        records.decode("hb/a", records.encode(EXAMPLES["hb/a"][0], b"x"))


def test_names():
    record, _ = EXAMPLES["c/0/8"]
    assert records.message_name(0, "a", 1, 2) == "u/0/a.1.2"
    assert records.record_name(0, 8) == "c/0/8" and records.snapshot_name(2, 64) == "s/2/64"
    assert records.gradient_name(record) == "g/0/8.a.1.0"
    assert records.number_of("g/0/8.a.1.0") == 8
    assert records.number_of("s/0/junk") == -1 and records.message_of("u/0/a.1.2") == ("a", 1, 2)
