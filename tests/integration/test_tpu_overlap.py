"""What the programs send between two or four slices of v5e:2x2, read off what libtpu compiled.

Nothing runs: positions, dtypes and bytes are facts of the schedule, times the compiler's estimates.
Every gate has a program beside it that fails it.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tpu_programs
from compile_tools import BYTES
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import corner, full

from maxdiloco.engine import collective
from maxdiloco.engine.calls import bytes_on_device
from maxdiloco.parallel.chips import CHIPS
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.planning import link_model
from maxdiloco.planning.hlo import notation, reader, replay, traffic

pytestmark = pytest.mark.tpu_aot

STREAMING = dict(sync_period=8, num_fragments=3, overlap_steps=2)
WIRES = {"float32": "f32", "bfloat16": "u16", "int8": "s8", "float4_e3m0": "u8"}
MOST_EXPOSED = 0.01


@pytest.fixture(scope="module")
def trainer():
    """Trainers by their options; each keeps the programs it has compiled."""

    @functools.cache
    def make(num_slices=2, axis="fsdp", **options):
        return tpu_programs.trainer(tpu_programs.mesh_of(num_slices, axis), **options)

    return make


def sent_by(compiled, num_slices=2):
    return traffic.transfers(reader.read(compiled.as_text()), {"diloco": num_slices})


def payload_dims(compiled):
    """Dims of what each send of a program gives the runtime."""
    items = [
        run.instruction for run in reader.executed_instructions(reader.read(compiled.as_text()))
    ]
    given = [notation.arrays(item.shape)[0] for item in items if item.opcode == "send"]
    return [notation.shape(text).dims for text in given]


def exposed(module):
    """The exposed part of a program's time on the link."""
    played = replay.replay(module, CHIPS["v5e"], 25.0)
    return link_model.share(played.waited, played.busy)


def compiled(fn, *args, **options):
    return jax.jit(fn, **options).lower(*args).compile()


FOUR_BITS = STREAMING | dict(exchange_dtype="float4_e3m0")
LATE = dict(sync_period=8, num_fragments=3, exchange_dtype="bfloat16")
BY_DATA = STREAMING | dict(axis="data")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("inner", FOUR_BITS),
        ("pack", FOUR_BITS),
        ("merge", FOUR_BITS),
        full("eager_step", LATE | dict(round_overlap="eager")),
        full("delayed_step", LATE | dict(round_overlap="delayed")),
        # With collectives inside a slice: by `data` the parts of a residual are gathered.
        full("pack", BY_DATA | dict(exchange_dtype="int2")),
        full("pack", BY_DATA | dict(exchange_dtype="topk")),
        full("merge", BY_DATA | dict(exchange_dtype="topk")),
    ],
)
def test_a_program_without_an_exchange_sends_nothing(trainer, kind, options):
    small = trainer(**options)
    assert sent_by(small.inner if kind == "inner" else small.program(kind, 1)) == []


@pytest.mark.parametrize("memory", corner(["device", "pinned_host"], ["device"]))
@pytest.mark.parametrize("wire", corner(["float32", "float4_e3m0"], ["float4_e3m0"]))
def test_the_step_hides_its_exchange(trainer, wire, memory):
    """Also with outer parameters in host memory. What arrives takes the memory of what it replaces:
    nothing else of the program shares more than in the plain step, which is the control."""
    in_memory = {} if memory == "device" else dict(outer_memory=memory)
    small = trainer(**STREAMING | dict(exchange_dtype=wire) | in_memory)
    module = reader.read(small.inner_exchange.as_text())
    pieces = sent_by(small.inner_exchange)
    assert len(pieces) == 1
    entry = module.entry.instructions
    loops = [i for i, item in enumerate(entry) if item.opcode == "while"]
    for transfer in pieces:
        starts = {item.name for item in entry if traffic.rendezvous_of(item) == transfer.rendezvous}
        first, *_, done = [
            i for i, item in enumerate(entry) if item.name in starts or starts & {*item.operands}
        ]
        assert len(starts) == 2 and entry[done].opcode in ("send-done", "recv-done")
        assert first < min(loops) and max(loops) < done
    assert exposed(module) <= MOST_EXPOSED
    plain, beside = (
        program.memory_analysis().alias_size_in_bytes
        for program in (small.inner, small.inner_exchange)
    )
    (arriving,) = small.algorithm.layout.state.incoming.read(0, [0])
    assert plain > 0 and beside - plain == bytes_on_device(arriving) > 0


def gathering_step(params, momentum, batch):
    """A step whose layers wait for a large all-gather, as of an embedding table."""
    table_BLD = jax.lax.with_sharding_constraint(batch, P())
    rows_B = jnp.argsort(batch[:, 0, 0])
    rows_B = jax.lax.with_sharding_constraint(rows_B, P("fsdp"))
    return tpu_programs.inner_step(params, momentum, table_BLD[rows_B])


BEHIND_A_GATHER = """
import test_tpu_overlap as here
import tpu_programs
from maxdiloco.parallel import chips

chips.hide_transfers()
small = tpu_programs.trainer(
    tpu_programs.mesh_of(2), step=here.gathering_step, batch_size=2048,
    exchange_dtype="float4_e3m0", **here.STREAMING,
)
small.inner  # the flag is read once
for item in here.reader.read(small.inner_exchange.as_text()).entry.instructions:
    if item.opcode in ("send", "while", "send-done"):
        print(item.opcode)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ["send", "while", "while", "send-done"]),
        ("--xla_tpu_pcie_bandwidth_multiplier=1", ["send", "send-done", "while", "while"]),
    ],
)
def test_a_send_ends_behind_loops_that_wait_for_a_large_gather(flags, expected):
    """Without our flag, the control, the gather counts for more than the transfer."""
    done = subprocess.run(
        [sys.executable, "-c", BEHIND_A_GATHER],
        env=os.environ | {"LIBTPU_INIT_ARGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.full
def test_an_exchange_in_a_conditional_is_exposed(trainer):
    """Positive control: the same step, carrying its chunk only if a flag is set."""
    small = trainer(exchange_dtype="float32", **STREAMING)
    state, slices = small.algorithm.layout.state, small.algorithm.mesh
    step = map_fn(tpu_programs.inner_step, mesh=slices)
    lies = NamedSharding(slices, collective.incoming_spec(slices))

    def exchange(params, opt_state, batch, chunk, wanted):
        absent = jnp.zeros(state.incoming.chunks[0].shape, chunk.dtype)
        absent = jax.lax.with_sharding_constraint(absent, lies)
        arrived = jax.lax.cond(
            wanted, lambda: collective.all_gather_chunk(chunk, slices), lambda: absent
        )
        return *step(params, opt_state, batch), arrived

    wanted = tpu_programs.struct(slices, (), dtype=jnp.bool_)
    args = (state.params, state.opt_state, small.batch, state.outgoing.chunks[0], wanted)
    program = compiled(exchange, *args)
    assert any(transfer.in_conditional for transfer in sent_by(program))
    assert exposed(reader.read(program.as_text())) > MOST_EXPOSED


CROSSING = [(wire, n, axis) for wire in WIRES for n in (2, 4) for axis in ("data", "fsdp")]


@pytest.mark.parametrize(
    ("wire", "num_slices", "axis"), corner(CROSSING, [("float4_e3m0", 2, "fsdp")])
)
def test_the_wire_crosses_as_it_is_and_once(trainer, wire, num_slices, axis):
    """Two layers of 2 * 128 * 512 values, in two chunks, over the four devices of a slice. The head
    has 128 * 128, in one chunk of the same length."""
    small = trainer(num_slices, axis, step=tpu_programs.tiny_step, exchange_dtype=wire, **STREAMING)
    programs = [small.inner_with(index) for index in (0, 1)]
    found = [sent_by(program, num_slices) for program in programs]
    for transfer in (*found[0], *found[1]):
        assert (transfer.dtype, transfer.padding) == (WIRES[wire], 0)
    assert {len(dims) for program in programs for dims in payload_dims(program)} == {1}
    of_head, per_device = (sum(transfer.bytes_sent for transfer in each) for each in found)
    assert of_head == per_device
    per_step = [small.algorithm.bytes_sent(t) for t in range(9, 17)]
    assert set(per_step) == {0, 4 * per_device}
    payload = 2 * 2 * 128 * 512 * BYTES[wire] * (num_slices - 1)
    tiles = 2 * 4 * 1024 * 4 * (num_slices - 1)
    assert payload <= 2 * 4 * per_device <= payload + tiles


OWNERS = dict(exchange_dtype="float4_e3m0", collective="reduce_scatter")


@pytest.mark.parametrize("num_slices", corner([2, 4], [2]))
def test_reduce_scatter_hides_its_parts_and_its_means(trainer, num_slices):
    """u8 both ways, nothing of it padding, all of it hidden; pack, reduce and merge send nothing.
    Bytes of two layers: half a byte of a parameter to owners and one of means, with scales and
    tiles."""
    small = trainer(num_slices, **STREAMING, **OWNERS)
    for kind in ("pack", "reduce", "merge"):
        assert not sent_by(small.program(kind, 1), num_slices)
    sent, values = 0, 2 * 2 * 128 * 512
    for name, kind in (("scatter", "all-to-all"), ("exchange", "all-gather")):
        program = small.inner_with(1, f"inner + {name}")
        found = sent_by(program, num_slices)
        assert {(x.kind, x.dtype, x.padding) for x in found} == {(kind, "u8", 0)}
        module = reader.read(program.as_text())
        assert exposed(module) <= MOST_EXPOSED
        bytes_sent = 4 * sum(x.bytes_sent for x in found)
        assert bytes_sent in [small.algorithm.bytes_sent(t) for t in range(9, 17)]
        sent += bytes_sent
    others = num_slices - 1
    wanted = (0.5 + 1 / 256 + 1 + 4 / 256) * values * others / num_slices
    assert wanted <= sent <= wanted + 2 * 2 * 4 * 1024 * others


@pytest.mark.full
@pytest.mark.parametrize("wire", WIRES)
def test_reduce_scatter_without_a_step_for_means_sends_the_same(trainer, wire):
    """tau=0, and the means of tau=1, which are waited for."""
    options = OWNERS | dict(exchange_dtype=wire)
    unsigned = {"float32": "u32", "bfloat16": "u16"}.get(wire, "u8")
    at_once = trainer(step=tpu_programs.tiny_step, sync_period=8, **options)
    one = trainer(step=tpu_programs.tiny_step, **STREAMING | dict(overlap_steps=1), **options)
    kinds = []
    for program in (at_once.program("synchronise", 0), one.program("reduce_and_share", 1)):
        found = sent_by(program)
        assert {(x.dtype, x.padding) for x in found} == {(unsigned, 0)}
        kinds.append(list(dict.fromkeys(x.kind for x in found)))
    assert kinds == [["all-to-all", "all-gather"], ["all-gather"]]


def test_a_mean_that_crosses_its_dtype_and_its_padding_are_seen(trainer):
    """Positive controls of those that send nothing, of the dtype and of the padding."""

    def mean_loss_step(params, momentum, batch):
        params, momentum, metrics = tpu_programs.tiny_step(params, momentum, batch)
        return params, momentum, {"loss": jax.lax.pmean(metrics["loss"], "diloco")}

    def quantised_mean(x_RN):  # each slice decodes its own and the sum crosses
        codes_RN = jnp.clip(jnp.round(x_RN * 16), -127, 127).astype(jnp.int8)
        return jnp.mean(codes_RN.astype(jnp.float32) / 16, axis=0)

    (transfer,) = sent_by(trainer(step=mean_loss_step, **STREAMING).inner)
    assert (transfer.kind, transfer.dtype) == ("all-reduce", "f32")
    slices = tpu_programs.mesh_of(2)
    x_RN = tpu_programs.struct(slices, (2, 1 << 16), "diloco", "fsdp")
    lies = NamedSharding(slices, P("fsdp"))
    (transfer,) = sent_by(compiled(quantised_mean, x_RN, out_shardings=lies))
    assert transfer.dtype == "f32"

    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "diloco", tiled=True),
        mesh=slices,
        in_specs=P("diloco", "fsdp"),
        out_specs=P(None, "fsdp"),
        check_vma=False,
    )
    payload = tpu_programs.struct(slices, (2, 4, 4096), "diloco", "fsdp", dtype=jnp.uint8)
    (transfer,) = sent_by(compiled(gather, payload))
    assert transfer.padding == 3 * 4096  # one row of a tile's four


@pytest.mark.parametrize(
    ("kind", "options", "on_host"),
    [
        ("synchronise", dict(sync_period=8, outer_memory="device"), 0),  # the control
        # theta of the two leaves, a quarter on each device; then with the momentum of two layers.
        full("pack", STREAMING, 4 * 2 * 128 * 512),
        ("merge", STREAMING, 4 * 2 * 128 * 512 + 2 * 2 * 128 * 512),
        # theta and momentum of everything.
        full("synchronise", dict(sync_period=8), 2 * (4 * 2 * 128 * 512 + 128 * 128)),
    ],
)
def test_outer_state_in_host_memory_compiles(trainer, kind, options, on_host):
    """Outer parameters and optimizer state are arguments and results in host memory, nothing else
    is, and nothing more crosses."""
    small = trainer(**dict(exchange_dtype="bfloat16", outer_memory="pinned_host") | options)
    fragment = 1 if kind != "synchronise" else 0
    program = small.program(kind, fragment)
    memory = program.memory_analysis()
    assert memory.host_argument_size_in_bytes == on_host
    assert memory.host_output_size_in_bytes == (0 if kind == "pack" else on_host)
    assert len(sent_by(program)) == (kind == "synchronise")
