"""The text of a scheduled module, line by line; its shapes and replica groups; values by hand."""

import re

import pytest
from hlo_excerpts import BESIDE_LOOP, IN_CONDITIONAL, changed

from maxdiloco.models.kernels.token_exchange import FURTHER_ROUNDS as ROUNDS
from maxdiloco.planning.hlo import notation, reader


def test_computations_and_the_order_of_entry():
    module = reader.read(BESIDE_LOOP)
    assert set(module.computations) == {"body.1", "fused.1", "condition.1", "main.1_spmd"}
    assert module.entry.name == "main.1_spmd"
    assert [i.opcode for i in module.entry.instructions[2:6]] == [
        "after-all", "send", "recv", "copy",
    ]  # fmt: skip
    assert module.entry.root().operands == ("get-tuple-element.14", "get-tuple-element.15")


def test_an_instruction_in_parts():
    """Pallas kernels print their metadata over several lines, with unpaired parentheses."""
    module = reader.read(BESIDE_LOOP)
    body = module.computation("body.1")
    assert len(body.instructions) == 8
    assert "jit(step)/while/body" in body["get-tuple-element.11"].attributes
    fusion = body["fusion.5"]
    assert fusion.shape == "bf16[8,64]{1,0:T(8,128)(2,1)S(1)}"
    assert (fusion.opcode, fusion.operands) == ("fusion", ("get-tuple-element.11",))
    assert fusion.called() == ("fused.1",)
    assert fusion.estimated_cycles() == 1500
    loop = module.entry["while.1"]
    assert (loop.attribute("condition"), loop.attribute("body")) == ("condition.1", "body.1")
    assert loop.shape.startswith("(s32[]{:T(128)}, bf16") and loop.estimated_cycles() is None
    assert module.entry["constant.10"].literal == "{0}"


def test_branches_are_called():
    module = reader.read(IN_CONDITIONAL)
    assert module.entry["conditional.1"].called() == ("branch_0", "branch_1")
    text = changed(
        IN_CONDITIONAL,
        "branch_computations={%branch_0, %branch_1}",
        "true_computation=%branch_0, false_computation=%branch_1",
    )
    assert reader.read(text).entry["conditional.1"].called() == ("branch_0", "branch_1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("is_scheduled=true", "x=1", "is_scheduled=true"),
        ("ENTRY ", "", "ENTRY"),
        ("  %add.5 = ", "  add ", "'add s32"),
        ("add(%get-tuple-element.10, %constant.7)", "add", "%add.5"),
        ("parameter(1)", "parameter(1", "parenthesis"),
    ],
)
def test_a_text_it_cannot_read(old, new, message):
    with pytest.raises(ValueError, match=message):
        reader.read(changed(BESIDE_LOOP, old, new))


def test_what_was_cut_out_is_missed():
    module = reader.read(changed(BESIDE_LOOP, "calls=%fused.1", "calls=%fused.2"))
    with pytest.raises(ValueError, match="%fused.2 "):
        list(reader.executed_instructions(module))
    with pytest.raises(ValueError, match=r"main.1_spmd .*%send.9"):
        module.entry["send.9"]
    module = reader.read(changed(BESIDE_LOOP, "  ROOT %tuple.7", "  %tuple.7"))
    with pytest.raises(ValueError, match=r"main.1_spmd .*ROOT"):
        module.entry.root()


def trips(text):
    module = reader.read(text)
    return reader.trip_count(module, module.entry, module.entry["while.1"])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", 8),
        ("%constant.9 = s32[]{:T(128)} constant(0)", "%constant.9 = s32[]{:T(128)} constant(3)", 5),
        # 0, 3, 6
        ("constant.7 = s32[]{:T(128)} constant(1)", "constant.7 = s32[]{:T(128)} constant(3)", 3),
        ("body=%body.1", 'body=%body.1, backend_config={"known_trip_count":{"n":"5"}}', 5),
        # Even use of the experts needs no further round.
        ("body=%body.1", f'body=%body.1, metadata={{op_name="jit(step)/{ROUNDS}/while"}}', 0),
    ],
)
def test_trips_of_a_loop(old, new, expected):
    assert trips(changed(BESIDE_LOOP, old, new)) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("constant(8)", "parameter(1)"),
        ("constant(0)", "partition-id()"),
        (" add(", " multiply("),
        ("while(%tuple.6)", "while(%param.1)"),
    ],
)
def test_a_loop_whose_trips_are_unknown(old, new):
    with pytest.raises(ValueError, match="trips of "):
        trips(changed(BESIDE_LOOP, old, new))


# -- bytes of shapes as XLA:TPU prints them, from the tiles ----------------------------------------


@pytest.mark.parametrize(
    ("text", "logical", "laid_out"),
    [
        ("u8[62464]{0:T(1024)(128)(4,1)}", 62464, 62464),  # 61 tiles of 1024
        ("u8[1000]{0:T(1024)(128)(4,1)}", 1000, 1024),
        ("f32[8,128]", 4096, 4096),
        ("f32[]{:T(128)}", 4, 512),  # a scalar fills a tile
        ("pred[]", 1, 1),
        ("u8[1,1,2048]{2,1,0:T(4,128)(4,1)}", 2048, 8192),  # one row of four is used
        ("bf16[1,4096]{1,0:T(2,128)(2,1)}", 8192, 16384),
        ("bf16[64,1024]{0,1:T(8,128)(2,1)S(1)}", 131072, 262144),  # 64 lies in 128 lanes
        ("f32[3,5,100]{0,2,1:T(8,128)}", 6000, 5 * 104 * 128 * 4),
        ("s4[4096]{0:T(1024)(128)(8,1)E(4)}", 2048, 2048),
    ],
)
def test_bytes_with_and_without_tile_padding(text, logical, laid_out):
    shape = notation.shape(text)
    assert (shape.bytes_logical(), shape.bytes_laid_out()) == (logical, laid_out)


@pytest.mark.parametrize(
    "text",
    [
        *("token[]", "(f32[2])", "f9[2]", "f32[2", "f32[<=8]{0}"),
        *(f"f32[2,2]{{1,0{layout}}}" for layout in (":T(*,128)", ":T(8,128)L(2)", ":D(D)")),
    ],
)
def test_a_shape_that_it_cannot_read(text):
    with pytest.raises(ValueError, match=re.escape(text)):
        notation.shape(text)


def test_parts_of_a_tuple():
    text = "(u8[2,4]{1,0:T(4,128)(4,1)}, /*index=1*/u32[], (s32[], token[]))"
    assert notation.arrays(text) == ["u8[2,4]{1,0:T(4,128)(4,1)}", "u32[]", "s32[]", "token[]"]
    assert notation.arrays("f32[2,4]{1,0}") == ["f32[2,4]{1,0}"]


# -- replica groups in every spelling --------------------------------------------------------------


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
        (
            "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        (
            "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'b'}",
            ((0, 1), (4, 5), (2, 3), (6, 7)),
        ),
        ("mesh['a'=4], device_ids=(3,1,2,0) {'a':(1)2}", ((3, 2), (1, 0))),
        # A part of an axis of 8 = 2 * 2 * 2: the middle one, which steps by 2.
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_every_spelling(text, expected):
    assert notation.groups(text) == expected
    for name in ("replica_groups", "source_target_pairs"):
        for rest in (", use_global_device_ids=true", ""):
            assert notation.groups_of(f", channel_id=45, {name}={text}{rest}") == expected


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
    assert notation.slices_of(target) == expected


UNKNOWN = r"spelling that this reader does not know: it reads \{"


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        *((notation.groups, text, UNKNOWN) for text in (
            "{}", "{0,1}", "[8]<=[8]x", "mesh['x'=2]{'x'}", "[2,4]<=[8]T", "{{0,1},{2,3}")),
        (notation.groups_of, ", replica_groups={}, channel_id=1", UNKNOWN),
        (notation.groups_of, ", channel_id=1", "no replica groups .* in ', channel_id=1'"),
        (notation.groups, "[2,4]<=[6]", "do not number every device once"),
        (notation.groups, "[8]<=[8]", "do not number every device once"),
        (notation.slices_of, "{{100000,200000},{300000}}", "are in unequal groups"),
    ],
)  # fmt: skip
def test_a_spelling_it_does_not_know(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
