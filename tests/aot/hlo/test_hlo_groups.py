"""Replica groups in every spelling; expected values by hand."""

import pytest

from maxdiloco.aot.hlo import groups


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0},{1}}", ((0,), (1,))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        # 0 1 2 3 over 4 5 6 7, transposed: 0 4, 1 5, 2 6, 3 7.
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        # [a, b, c] = 4a + 2b + c, as [b, c, a] in rows of four.
        ("[2,4]<=[2,2,2]T(1,2,0)", ((0, 4, 1, 5), (2, 6, 3, 7))),
        # Devices in order along the axes; those that differ along the named ones are a group.
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        # 0 1 2 3 over 4 5 6 7, transposed, is 0 4 1 5 2 6 3 7: [[0 4] [1 5]] and [[2 6] [3 7]].
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
         ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'b'}",
         ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("mesh['a'=4], device_ids=(3,1,2,0) {'a':(1)2}", ((3, 2), (1, 0))),
        # A part of an axis of 8 = 2 * 2 * 2: the middle one, which steps by 2.
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_every_spelling(text, expected):
    assert groups.read(text) == expected
    for name in ("replica_groups", "source_target_pairs"):
        for rest in (", use_global_device_ids=true", ""):
            assert groups.of(f", channel_id=45, {name}={text}{rest}") == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("{1,2}x{0:3}", ((0, 1),)),
        ("{0,1}x{0:3}", ((0, 1),)),
        ("{1,2,3,4}x{0}", ((0, 1, 2, 3),)),
        ("{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}", ((0, 2), (1, 3))),
        ("{{200000->100000},{200001->100001}}", ((0, 1),)),
        ("{{100001->200000},{100003->300000},{300000->100001}}", ((0, 1), (0, 2))),
    ],
)
def test_slices_of_a_transfer(target, expected):
    assert groups.slices_of(target) == expected


UNKNOWN = r"spelling that this reader does not know: it reads \{"


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        *((groups.read, text, UNKNOWN) for text in (
            "{}", "{0,1}", "[8]<=[8]x", "mesh['x'=2]{'x'}", "[2,4]<=[8]T", "{{0,1},{2,3}")),
        (groups.of, ", replica_groups={}, channel_id=1", UNKNOWN),
        (groups.of, ", channel_id=1", "no replica groups that can be read in ', channel_id=1'"),
        (groups.read, "[2,4]<=[6]", "do not number every device once"),
        (groups.read, "[8]<=[8]", "do not number every device once"),
        (groups.slices_of, "{{100000,200000},{300000}}", "are in unequal groups"),
    ],
)  # fmt: skip
def test_a_spelling_it_does_not_know(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
