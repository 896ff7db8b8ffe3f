"""dcn/bytes_sent against compiled CPU programs of two and four slices of four devices.

tests/integration/test_tpu_overlap.py does the same with programs for TPU slices.
"""

import itertools
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WIRES = ("float32", "bfloat16", "int8", "float4_e3m0")
# Of one value, with its share of the scale of a block of 256.
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256, "float4_e3m0": 0.5 + 1 / 256}
ITEM = {"float32": 4, "bfloat16": 2, "int8": 1, "float4_e3m0": 1}
LARGEST = 2 * 64 * 96  # values of a fragment of two layers; it rides two steps


@pytest.fixture(scope="module")
def cases():
    """{(M, in-slice axis, wire): what tests/bytes_sent.py measured}."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "bytes_sent.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["M"], row["axis"], row["wire"]): row for row in rows}


def groups_across(M):
    """Of M slices of devices 4 m to 4 m + 3: device i of every slice."""
    return "{{" + "},{".join(",".join(str(4 * m + i) for m in range(M)) for i in range(4))


@pytest.mark.parametrize("axis", ["data", "fsdp"])
@pytest.mark.parametrize("M", [2, 4])
@pytest.mark.parametrize("wire", WIRES)
def test_bytes_sent_is_what_the_compiled_exchange_moves(cases, wire, M, axis):
    """One collective, across slices alone. Sends at 2, 4 and 6, the last of which needs one chunk:
    of steps 7 to 12 all but the eighth carry one."""
    found = cases[M, axis, wire]
    assert (found["kind"], found["groups"]) == ("all-gather", groups_across(M))
    sent = found["of_slice"]
    assert found["bytes_sent"] == [sent, 0, sent, sent, sent, sent]


@pytest.mark.parametrize("axis", ["data", "fsdp"])
@pytest.mark.parametrize("M", [2, 4])
@pytest.mark.parametrize("wire", WIRES)
def test_each_payload_byte_leaves_a_slice_once_for_every_other_slice(cases, wire, M, axis):
    """The same for leaves that four devices hold alike (data) and for leaves they share (fsdp).

    Two chunks on each of four devices, both rounded up to 1024 elements."""
    payload = LARGEST * BYTES[wire] * (M - 1)
    tiles = 2 * 4 * 1024 * ITEM[wire] * (M - 1)
    assert payload <= 2 * cases[M, axis, wire]["of_slice"] <= payload + tiles
    assert payload > tiles / 2  # else four times the payload would pass for rounding


def test_every_case_is_measured(cases):
    assert set(cases) == set(itertools.product((2, 4), ("data", "fsdp"), WIRES))
