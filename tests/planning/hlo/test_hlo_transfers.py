"""What a program sends to other slices; bytes by hand."""

import pytest
from hlo_excerpts import BESIDE_LOOP, IN_CONDITIONAL, changed

from maxdiloco.planning.hlo import reader, traffic


def found(text, slices=2):
    return traffic.transfers(reader.read(text), {"diloco": slices})


def test_an_exchange_beside_a_loop():
    (transfer,) = found(BESIDE_LOOP)
    assert (transfer.rendezvous, transfer.kind) == ("all_gather.3_0", "all-gather")
    assert (transfer.dtype, transfer.axes) == ("u8", ("diloco",))
    assert not transfer.in_conditional
    assert transfer.padding == 0
    assert transfer.bytes_sent == 62464


def test_an_exchange_in_a_branch_with_padding():
    (transfer,) = found(IN_CONDITIONAL)
    assert transfer.in_conditional
    assert transfer.padding == 7 * 4096 * 4  # one row of eight is used
    assert transfer.bytes_sent == 8 * 4096 * 4


@pytest.mark.parametrize(
    ("kind", "bytes_sent"),
    [
        ("ALL_GATHER", 3 * 62464),
        ("ALL_TO_ALL", 62464 * 3 // 4),
        ("REDUCE_SCATTER", 62464 * 3 // 4),
        ("ALL_REDUCE", 2 * 62464 * 3 // 4),
        ("ONE_TO_ONE", 62464),
    ],
)
def test_bytes_of_one_of_four_slices(kind, bytes_sent):
    text = changed(BESIDE_LOOP, "{1,2}x{0:3}", "{1,2,3,4}x{0:3}")
    (transfer,) = found(text.replace("ALL_GATHER", kind), slices=4)
    assert transfer.bytes_sent == bytes_sent


def test_a_branch_below_a_call_is_conditional_too():
    """Positive control: the same call outside the conditional is not."""
    call = "  %x = f32[] call(), to_apply=%branch_1\n"
    text = changed(IN_CONDITIONAL, "branch_computations={%branch_0, %branch_1}",
                   "branch_computations={%branch_0, %branch_0}")  # fmt: skip
    start = "  %arg_tuple.1 ="
    (inside,) = found(changed(text, start, call + start))
    start = "  %param.2 ="
    (outside,) = found(changed(text, start, call + start))
    assert inside.in_conditional and not outside.in_conditional


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("xla_megascale_runtime", "other", "%send .*'other'"),
        ("_xla_host_transfer_rendezvous", "_x", "%send .*_xla_host_transfer_rendezvous"),
        ("_xla_megascale_transfer_type", "_x", "%send .*_xla_megascale_transfer_type"),
        ("_xla_megascale_target", "_x", "%send .*_xla_megascale_target"),
        ("{1,2}x{0:3}", "all", "'all'"),
        ("ALL_GATHER", "MULTICAST", "%send .*multicast"),
        ("send-done(%send)", "send-done(%x)", "main.1_spmd"),
        (" recv(%after-all)", " send(%after-all)", "main.1_spmd"),
    ],
)
def test_a_construct_it_does_not_know(old, new, message):
    with pytest.raises(ValueError, match=message):
        [transfer.bytes_sent for transfer in found(changed(BESIDE_LOOP, old, new))]


def test_a_rendezvous_in_two_places():
    old = "%copy.1 = f32[1,1,4096]{2,1,0:T(1,128)} copy(%get-tuple-element.1), backend_config="
    new = (
        "%copy.1 = (f32[1,1,4096], u32[], token[]) send(%get-tuple-element.1), "
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_host_transfer_rendezvous="all-reduce.2_0", backend_config='
    )
    with pytest.raises(ValueError, match="all-reduce.2_0 .*branch_. .*branch_."):
        found(changed(IN_CONDITIONAL, old, new))
