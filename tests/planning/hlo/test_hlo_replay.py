"""Exposed parts of the traffic, by hand.

62464 bytes at 25 Gbit/s take 19.98848 us. A copy of 3000 cycles and 8 trips of 1500 at 1.5 GHz
take 2 + 8 = 10 us.
"""

import pytest
from hlo_excerpts import BESIDE_LOOP, IN_CONDITIONAL, changed

from maxdiloco.parallel.chips import Chip
from maxdiloco.planning import link_model
from maxdiloco.planning.hlo import kernels, reader, replay

CHIP = Chip(("a chip",), 1e12, clock_hz=1.5e9, ici_gbps=1600)


def exposed(text, *, gbps=25.0, send_done_waits=True):
    played = replay.replay(reader.read(text), CHIP, gbps, send_done_waits=send_done_waits)
    return link_model.share(played.waited, played.busy)


def put_before(text, place, *lines):
    """The text with lines before the one that begins with `place`."""
    return changed(text, place, "\n".join([*lines, place]))


def line_of(text, part):
    return next(line for line in text.splitlines() if part in line)


def test_what_the_loop_does_not_hide_is_exposed():
    assert exposed(BESIDE_LOOP) == pytest.approx(1 - 10 / 19.98848)
    assert exposed(BESIDE_LOOP, gbps=12.5) == pytest.approx(1 - 10 / (2 * 19.98848))
    four = changed(BESIDE_LOOP, "{1,2}x{0:3}", "{1,2,3,4}x{0:3}")
    assert exposed(four) == pytest.approx(1 - 10 / (3 * 19.98848))
    assert exposed(BESIDE_LOOP, gbps=51) == 0.0  # fast enough
    none = changed(IN_CONDITIONAL, "{%branch_0, %branch_1}", "{%branch_0, %branch_0}")
    assert exposed(none) == 0.0


def test_time_before_the_send_and_after_the_done_hides_nothing():
    """Without the loop between them only the copy's 2 us are left. A recv-done waits under both
    readings, a send-done under one."""
    for early, least in (("-done = ", 2), ("%send-done = ", 10)):
        done = [line for line in BESIDE_LOOP.splitlines() if early in line]
        rest = "\n".join(line for line in BESIDE_LOOP.splitlines() if line not in done)
        loop = line_of(rest, "while.1 = ")
        text = rest.replace(loop, "\n".join([*done, loop]))
        assert exposed(text) == pytest.approx(1 - 2 / 19.98848)
        assert exposed(text, send_done_waits=False) == pytest.approx(1 - least / 19.98848)
    either = exposed(BESIDE_LOOP, send_done_waits=False)
    assert either == pytest.approx(1 - 10 / 19.98848)


def test_nothing_outside_a_conditional_hides_what_is_inside():
    """900000 cycles before it, and the same in the branch without the exchange."""
    assert exposed(IN_CONDITIONAL) == pytest.approx(1.0)


COPY = """%NAME (p: bf16[8,64]) -> bf16[8,64] {
  %p = bf16[8,64] parameter(0)
  ROOT %c = bf16[8,64] copy(%p), backend_config={"estimated_cycles":"CYCLES"}
}
"""


@pytest.mark.parametrize(
    ("item", "more"),
    [
        ("conditional(%param.1), branch_computations={%long, %short}", 1),  # the shortest branch
        ("call(%param.1), to_apply=%long", 2),
    ],
)
def test_what_is_called_beside_an_exchange_takes_its_time(item, more):
    called = (COPY.replace("NAME", name).replace("CYCLES", cycles)
              for name, cycles in (("short", "1500"), ("long", "3000")))  # fmt: skip
    text = put_before(BESIDE_LOOP, "%body.1 (", *called)
    text = put_before(text, "  %send-done =", f"  %k = bf16[8,64] {item}")
    assert exposed(text) == pytest.approx(1 - (10 + more) / 19.98848)


def test_the_link_carries_one_transfer_after_the_other():
    """Two payloads of 19.98848 us behind the same 10 us."""
    second = [
        line.replace("%send", "%send.2").replace("%recv", "%recv.2").replace("3_0", "4_0")
        for line in BESIDE_LOOP.splitlines()
        if "megascale_runtime" in line
    ]
    text = put_before(BESIDE_LOOP, "  %copy.1 =", *second[:2])
    text = put_before(text, "  %get-tuple-element.15 =", *second[2:])
    assert exposed(text) == pytest.approx(1 - 10 / (2 * 19.98848))


def test_an_exchange_in_a_loop_counts_at_every_trip():
    """Eight exchanges, each beside one fusion of 1 us."""
    lines = BESIDE_LOOP.splitlines()
    moved = [line for line in lines if "megascale_runtime" in line or "%after-all =" in line]
    kept = [line for line in lines if line not in moved and "%recv-done" not in line]
    text = "\n".join(kept)
    text = changed(text, "%get-tuple-element.15)", "%param.183)")
    text = put_before(text, "  %add.5 =", *moved[:3])
    text = put_before(text, "  ROOT %tuple.5 =", *moved[3:])
    assert exposed(text) == pytest.approx(1 - 1 / 19.98848)


KERNEL = """  %blocks = s8[1,4,4]{2,1,0} constant({...})
  %q = bf16[2,8,1024,64]{3,2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %splash_mha_dq_no_residuals.3 = (f32[4,512,64]{2,1,0}, bf16[2,8,1024,64]{3,2,1,0}) custom-call(\
%blocks, %q, %q, %q), custom_call_target="tpu_custom_call"
"""


def test_an_attention_kernel_takes_the_time_of_its_products():
    """Three products of 2 * 2 * 8 * 1024 * 1024 * 128 lanes, 10 of 16 blocks: 8.05e9 FLOPs."""
    text = changed(BESIDE_LOOP, "  %send-done =", KERNEL + "  %send-done =")
    flops = 3 * 2 * 2 * 8 * 1024 * 1024 * 128 * 10 / 16
    chip = CHIP._replace(peak_flops=flops / 5e-6)
    played = replay.replay(reader.read(text), chip, 25.0)
    assert played.waited == pytest.approx((19.98848 - 10 - 5) * 1e-6)
    other = changed(text, "%splash_mha_dq_no_residuals.3", "%another_kernel")
    assert replay.replay(reader.read(other), chip, 25.0).waited == pytest.approx(9.98848e-6)


EXPERTS = """\
  %x = bf16[4096,256]{1,0} custom-call()
  %w = bf16[8,256,512]{2,1,0} custom-call()
  %dy = bf16[4096,512]{1,0} custom-call()
  %n = s32[9]{0} custom-call()
  %ragged-dot-metadata = s32[9]{0} custom-call(%n), KERNEL
  %tgmm.1 = bf16[8,256,512]{2,1,0} custom-call(%n, %x, %dy), KERNEL, backend_config={\
"custom_call_config":{"cost_estimate":{"flops":"1073741824","transcendentals":"0"}}}
  %swish.1 = bf16[4096,512]{1,0} custom-call(%n, %x, %w), KERNEL
""".replace("KERNEL", 'custom_call_target="tpu_custom_call"')


def test_a_kernel_brings_its_own_estimate():
    """4096 rows of 256 by 512, by one expert each. A kernel without one is unknown."""
    module = reader.read(changed(BESIDE_LOOP, "  %send-done =", EXPERTS + "  %send-done ="))
    expected = {"ragged-dot-metadata": 0, "tgmm.1": 2 * 4096 * 256 * 512, "swish.1": None}
    found = {run.instruction.name: kernels.kernel_flops(run.computation, run.instruction)
             for run in reader.executed_instructions(module)
             if run.instruction.name in expected}  # fmt: skip
    assert found == expected


def test_custom_calls_that_are_unknown_are_counted():
    """One in the loop, at each of its eight trips, and a kernel with two numbers. Work on the host,
    such as a reshape of an array in its memory, is known. None of them adds time."""
    call = '  %odd.3 = f32[] custom-call(), custom_call_target="Odd"'
    kernel = '  %mine.4.1 = f32[] custom-call(), custom_call_target="tpu_custom_call"'
    host = '  %host = f32[] custom-call-start(), custom_call_target="HostExecute"'
    text = put_before(BESIDE_LOOP, "  %fusion.5 =", call)
    text = put_before(text, "  %copy.1 =", kernel, host)
    assert kernels.unknown_calls(reader.read(text)) == {"Odd": 8, "mine": 1}
    assert exposed(text) == exposed(BESIDE_LOOP)


PRODUCT = 2 * 2 * 8 * 1024 * 1024 * 128  # of two sequences, eight heads, all pairs, 128 lanes
OF_KEYS = "bf16[2,8,1024,64]{3,2,1,0}"
HALF_OF_QUERIES = [("s8[1,4,4]{2,1,0}", "s8[1,2,4]{2,1,0}"), ("%q, %q, %q)", "%r, %q, %q)")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], 3 * PRODUCT * 10 / 16),
        # Tokens in the lanes: [.., 64, 1024] goes in, [.., 1024, 64] comes out.
        ([("%q = bf16[2,8,1024,64]", "%q = bf16[2,8,64,1024]")], 3 * PRODUCT * 10 / 16),
        # A batch of one sequence has no dim of its own.
        ([("%q = bf16[2,8,1024,64]{3,2,1,0}", "%q = bf16[8,1024,64]{2,1,0}"),
          ("(f32[4,512,64]{2,1,0}, bf16[2,8,1024,64]{3,2,1,0})",
           "(f32[512,64]{1,0}, bf16[8,1024,64]{2,1,0})")],
         3 * PRODUCT * 10 / 16 / 2),
        # A window: two of four blocks a row, 1 + 2 + 2 + 2 of 16.
        ([("s8[1,4,4]", "s8[1,4,2]")], 3 * PRODUCT * 7 / 16),
        # Devices that share sequences share their products: 512 queries of 1024 keys, 2 by 4 blocks
        # of 256. The gradients of the keys are of all 1024.
        ([*HALF_OF_QUERIES, ("bf16[2,8,1024,64]{3,2,1,0}) custom", "bf16[2,8,512,64]) custom")],
         3 * PRODUCT * 10 / 16 / 2),
        ([*HALF_OF_QUERIES, ("_dq_", "_dkv_"), (f"{OF_KEYS})", f"{OF_KEYS}, {OF_KEYS})")],
         4 * PRODUCT * 10 / 16 / 2),
    ],
)  # fmt: skip
def test_products_of_an_attention_kernel(changes, expected):
    kernel = KERNEL + "  %r = bf16[2,8,512,64]{3,2,1,0} custom-call()\n"
    for old, new in changes:
        kernel = changed(kernel, old, new)
    text = changed(BESIDE_LOOP, "  %send-done =", kernel + "  %send-done =")
    runs = reader.executed_instructions(reader.read(text))
    (run,) = [run for run in runs if run.instruction.name.startswith("splash")]
    assert kernels.kernel_flops(run.computation, run.instruction) == expected


LATENT = """  %blocks = s8[1,4,4]{2,1,0} constant({...})
  %q = bf16[8,192,1024]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %v = bf16[8,128,1024]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %splash_mha_KERNEL_segmented.1 = (f32[256,192]{1,0}, RESULTS) custom-call(%blocks, %q, %q, %v), \
custom_call_target="tpu_custom_call"
"""
WIDE, NARROW = "bf16[8,1024,192]{2,1,0}", "bf16[8,1024,128]{2,1,0}"
NORMALISERS = "f32[8,1024,128]{2,1,0}"


@pytest.mark.parametrize(
    ("kernel", "results", "wide", "narrow"),
    [
        ("fwd", (NARROW, NORMALISERS), 1, 1),  # scores; context
        ("dkv", (WIDE, NARROW), 2, 2),  # scores, keys; weights, values
        ("dq", (WIDE,), 2, 1),  # scores, queries; weights
        ("dq", (), None, None),  # of another kernel by that name
        ("dkv", (NARROW, WIDE), None, None),
    ],
)
def test_values_narrower_than_keys_have_smaller_products(kernel, results, wide, narrow):
    """Latent attention: 192 features of keys fill 256 lanes, 128 of values 128."""
    lines = LATENT.replace("KERNEL", kernel).replace("RESULTS", ", ".join(results))
    text = changed(BESIDE_LOOP, "  %send-done =", lines + "  %send-done =")
    runs = reader.executed_instructions(reader.read(text))
    (run,) = [run for run in runs if run.instruction.name.startswith("splash")]
    expected = wide and 2 * 8 * 1024 * 1024 * (256 * wide + 128 * narrow) * 10 / 16
    assert kernels.kernel_flops(run.computation, run.instruction) == expected


def test_an_attention_kernel_with_other_operands_is_unknown():
    """More blocks than tokens; no table of blocks; a shape that cannot be read."""
    lines = LATENT.replace("KERNEL", "dq").replace("RESULTS", WIDE)
    for old, new in (
        ("s8[1,4,4]", "s8[1,4096,4]"),
        ("%blocks, %q, %q, %v)", "%q, %q, %v)"),
        ("bf16[8,192,1024]{2,1,0} custom-call()", "(f32[2], f32[2]) custom-call()"),
    ):
        text = changed(BESIDE_LOOP, "  %send-done =", changed(lines, old, new) + "  %send-done =")
        runs = reader.executed_instructions(reader.read(text))
        (run,) = [run for run in runs if run.instruction.name.startswith("splash")]
        assert kernels.kernel_flops(run.computation, run.instruction) is None, new


def test_what_goes_to_a_sparse_core_has_no_estimate():
    """Its cycles are printed as the largest number there is; the loop alone hides 10 us."""
    line = line_of(BESIDE_LOOP, "%copy.1 = ")
    cores = """\
  %prepared = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"
  %cores = ((f32[8]), f32[8]) call-start(%prepared), to_apply=%on_cores
  %cores-done = f32[8] call-done(%cores)
"""
    called = """\
%on_cores (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %sorted = f32[8] sort(%x), backend_config={"estimated_cycles":"9223372036854775807"}
}

ENTRY """
    text = changed(changed(BESIDE_LOOP, line, cores + line), "ENTRY ", called)
    assert exposed(text) == pytest.approx(exposed(BESIDE_LOOP))


def test_an_operation_it_does_not_know():
    line = line_of(BESIDE_LOOP, "%copy.1 = ")
    other = line.partition(" copy(")[0] + " collective-broadcast(%param.1)"
    text = changed(BESIDE_LOOP, line, other)
    with pytest.raises(ValueError, match="'collective-broadcast'.*UNTIMED"):
        exposed(text)
