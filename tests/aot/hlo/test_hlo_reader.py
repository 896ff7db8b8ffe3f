"""The text of a scheduled module, line by line."""

import pytest
from hlo_excerpts import BESIDE_LOOP, IN_CONDITIONAL, changed

from maxdiloco.aot.hlo import loops, reader


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
        ("is_scheduled=true", "x=1", "lacks is_scheduled=true.*Give the text of a compiled"),
        ("ENTRY ", "", "no whole ENTRY computation. Give the whole module"),
        ("  %add.5 = ", "  add ", "cannot read this line as an HLO instruction: 'add s32"),
        ("add(%get-tuple-element.10, %constant.7)", "add", "cannot read this line"),
        ("parameter(1)", "parameter(1", "a parenthesis is never closed"),
    ],
)
def test_a_text_it_cannot_read(old, new, message):
    with pytest.raises(ValueError, match=message):
        reader.read(changed(BESIDE_LOOP, old, new))


def test_what_was_cut_out_is_missed():
    module = reader.read(changed(BESIDE_LOOP, "calls=%fused.1", "calls=%fused.2"))
    with pytest.raises(ValueError, match="%fused.2 is called but not in the text. Give the whole"):
        list(module.reached())
    with pytest.raises(ValueError, match=r"main.1_spmd has no %send.9: the text was cut. Give"):
        module.entry["send.9"]
    module = reader.read(changed(BESIDE_LOOP, "  ROOT %tuple.7", "  %tuple.7"))
    with pytest.raises(ValueError, match=r"main.1_spmd has no ROOT: the text was cut. Give"):
        module.entry.root()


def trips(text):
    module = reader.read(text)
    return loops.trip_count(module, module.entry, module.entry["while.1"])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", 8),
        ("%constant.9 = s32[]{:T(128)} constant(0)", "%constant.9 = s32[]{:T(128)} constant(3)", 5),
        # 0, 3, 6
        ("constant.7 = s32[]{:T(128)} constant(1)", "constant.7 = s32[]{:T(128)} constant(3)", 3),
        ("body=%body.1", 'body=%body.1, backend_config={"known_trip_count":{"n":"5"}}', 5),
    ],
)
def test_trips_of_a_loop(old, new, expected):
    assert trips(changed(BESIDE_LOOP, old, new)) == expected


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("direction=LT", "direction=NE", "its condition is not `counter < bound`"),
        ("constant(8)", "parameter(1)", "its condition is not `counter < bound`"),
        ("constant(0)", "partition-id()", "the counter's start or step is not in the text"),
        (" add(", " multiply(", "the counter's start or step is not in the text"),
        ("while(%tuple.6)", "while(%param.1)", "its initial value is not a tuple"),
    ],
)
def test_a_loop_whose_trips_are_unknown(old, new, why):
    with pytest.raises(ValueError, match=f"trips of .* are unknown: {why}.*Only counted loops"):
        trips(changed(BESIDE_LOOP, old, new))
