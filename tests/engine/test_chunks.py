"""Chunks of one length or two: what a second one saves, and runs that have it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import corner, full

from maxdiloco import DiLoCo
from maxdiloco.checkpoint import saved_state
from maxdiloco.engine import chunks
from maxdiloco.engine.state import Layout
from maxdiloco.engine.trainer import SavedLayout

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

K = 1024  # a tile


@pytest.mark.parametrize(
    ("sizes", "max_chunks", "unit", "found"),
    [
        # At tau=1 the embedding and the layers have a length each: 60 tiles, not 120.
        ([40, 10, 10], 1, 64, (10, 30)),
        ([10, 40, 40], 1, 64, (10, 30)),  # either kind may be the larger one
        ([40, 20, 10], 1, 64, (20, 20)),  # the one that saves most: 80 tiles of 120, not 90
        ([40, 20, 10, 10], 1, 64, (20, 20)),  # 100 either way: the longer one takes no more steps
        ([40] * 4, 3, 64, (14,)),  # equal fragments have one length
        ([100] * 30 + [10], 1, 64, (100,)),  # it would save 3 %, and has to save a tenth
        ([100] * 2 + [10], 1, 64, (10, 90)),
        # It has to save 64 KiB; 30 tiles are 30 of one device, one byte an element, 120 of four.
        ([40, 10], 1, 1, (40,)),
        ([40, 10], 1, 4, (10, 30)),
    ],
)
def test_the_second_length_is_the_one_that_saves_most_if_it_saves_enough(
    sizes, max_chunks, unit, found
):
    sizes = [K * size for size in sizes]
    pieces = chunks.pieces_of_a_chunk(sizes, max_chunks=max_chunks, unit=unit)
    assert pieces == tuple(K * length for length in found)


def test_the_arrays_of_a_short_chunk_are_the_first_of_a_long_one():
    """Two arrays a chunk, of which short chunks leave out the second."""
    layout = SimpleNamespace(pieces=(3 * K, 7 * K))
    short, long = (SimpleNamespace(num_chunks=3, num_pieces=n) for n in (1, 2))
    assert Layout.places(layout, short) == [0, 2, 4]
    assert Layout.places(layout, long) == [0, 1, 2, 3, 4, 5]
    assert Layout.places(layout, short, [1]) == [2] and Layout.places(layout, long, [1]) == [2, 3]


def test_a_fragment_has_the_chunks_that_send_least():
    """In 4 steps: 40 tiles in 4 long chunks of 10; 10 tiles in 1 long one, 12 in 4 short ones of 3,
    where long ones would take 20 tiles."""
    lengths = (3 * K, 7 * K)
    assert chunks.cut(40 * K, lengths, 4) == (40 * K, 4, 2)
    assert chunks.cut(10 * K, lengths, 4) == (10 * K, 1, 2)
    assert chunks.cut(12 * K, lengths, 4) == (12 * K, 4, 1)
    assert chunks.cut(13 * K, lengths, 4) == (20 * K, 2, 2), "5 short ones do not fit 4 steps"
    assert chunks.cut(10 * K, (5 * K, 5 * K), 4) == (10 * K, 1, 2), "equal: fewer, long ones"


@pytest.mark.parametrize("max_chunks", [1, 2, 5, 33])
def test_no_length_sends_more_than_one_for_all(max_chunks):
    sizes = [41_003, 9_001, 9_001, 12_500]
    found = chunks.pieces_of_a_chunk(sizes, max_chunks=max_chunks, unit=64)
    assert not any(length % K for length in found)
    cuts = [chunks.cut(size, found, max_chunks) for size in sizes]
    longest = sum(found)
    assert sum(sent for sent, _, _ in cuts) <= sum(-(-size // longest) * longest for size in sizes)
    for size, (sent, num_chunks, _) in zip(sizes, cuts, strict=True):
        assert size <= sent and num_chunks <= max_chunks


# --- runs whose chunks have two lengths -------------------------------------------------------

# Four layers of 3,000 values in two fragments; the table alone is one.
PARAMS = {
    "table": np.linspace(-1, 1, 1500, dtype=np.float32),
    "w": np.linspace(-2, 1, 4 * 3000, dtype=np.float32).reshape(4, 3000),
}
MODES = {
    "tau 1": dict(overlap_steps=1),
    "tau 3": dict(overlap_steps=3),
    "delayed": dict(outer_overlap="delayed"),
    "eager": dict(outer_overlap="eager"),
}
# Of every run here, but for what it changes.
OPTIONS = dict(num_replicas=2, sync_period=6, num_fragments=3, exchange_dtype="float4_e3m0")
STEPS = 16


def inner_step(params, opt_state, batch):
    return jax.tree.map(lambda p: p - 0.1 * (p - batch), params), opt_state, {}


def trainer(mode, **options):
    options |= MODES[mode] | OPTIONS
    algorithm = DiLoCo(inner_step, layer_axis={"table": None, "w": 0}, **options)
    return algorithm, algorithm.init(jax.tree.map(jnp.asarray, PARAMS), ())


def steps(algorithm, state, until=STEPS):
    while state.t < until:
        state, _ = algorithm.step(state, np.array([1, 2], np.float32) * state.t)
        yield state


def bits(state):
    trees = (state.params, state.outer, state.outer_opt, state.bad, state.sizes)
    return [np.array(x).tobytes() for x in jax.tree.leaves(trees)]


@pytest.fixture
def length(monkeypatch):
    """Sets how many lengths the trainers made from then on have."""

    def of(number):
        monkeypatch.setattr(chunks, "LEAST_BYTES", {1: 1 << 60, 2: 0}[number])
        monkeypatch.setattr(chunks, "LEAST_PART", 0.0)

    return of


@pytest.mark.parametrize("mode", corner(MODES, ["tau 3", "eager"]))
def test_two_lengths_give_the_bits_of_one_with_fewer_bytes_and_one_program_more(length, mode):
    found, sent, names = {}, {}, {}
    runs = [(1, "program"), (2, "program")] + [(2, "host")] * (mode == "tau 3")
    for number, carrier in runs:
        length(number)
        told = names[number, carrier] = []
        note = lambda name, *_, told=told: told.append(name)  # noqa: E731
        algorithm, state = trainer(mode, exchange_carrier=carrier, on_compile=note)
        assert len(algorithm.layout.pieces) == number
        found[number, carrier] = [bits(each) for each in steps(algorithm, state)]
        layout = algorithm.layout
        sent[number] = sum(plan.num_chunks * layout.chunk_bytes(plan) for plan in layout.plans)
        algorithm.close()
    assert all(found[run] == found[1, "program"] for run in runs)
    assert len(set(map(str, found[1, "program"]))) == STEPS, "every step changes something"
    assert sent[2] < sent[1]
    one, two = names[1, "program"], names[2, "program"]
    assert [name for name in one if "exchange" in name] == ["inner + exchange"]
    both = ["inner + exchange [long chunk]", "inner + exchange [short chunk]"]
    assert sorted(name for name in two if "exchange" in name) == both
    assert len(two) == len(one) + 1


@pytest.mark.parametrize(("fsdp", "number"), [(1, 1), (4, 2)])
def test_a_second_length_counts_the_bytes_of_all_devices_of_a_slice(devices, fsdp, number):
    """Fragments of 40 and of 10 KiB a device: 30 KiB saved on one device, 120 on four."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, fsdp), ("diloco", "fsdp"), auto, devices=devices[: 2 * fsdp])
    sharding = NamedSharding(mesh, P("fsdp"))
    params = {
        name: jax.ShapeDtypeStruct((fsdp * kib * 1024,), jnp.float32, sharding=sharding)
        for name, kib in (("large", 40), ("small", 10))
    }
    options = OPTIONS | dict(num_fragments=2, exchange_dtype="int8")
    algorithm = DiLoCo(inner_step, overlap_steps=1, mesh=mesh, **options)
    algorithm.bind(params, ())
    assert len(algorithm.layout.pieces) == number


@pytest.mark.parametrize("mode", ["tau 3", full("eager")])
def test_a_run_resumes_with_the_same_bits_between_send_and_apply(length, mode):
    length(2)
    algorithm, state = trainer(mode)
    whole, saved = [], {}
    for each in steps(algorithm, state):
        whole.append(bits(each))
        items, note = algorithm.saved_items(each), algorithm.note(each)
        saved[each.t] = jax.tree.map(lambda x: jnp.array(np.array(x)), items), note
    for t in (7, 8):  # one chunk has arrived of the exchange sent after step 6; all and a new one
        items, note = saved[t]
        state = algorithm.reading(SavedLayout(**note, same_rules=True)).state_of(items, t=t)
        assert [bits(each) for each in steps(algorithm, state)] == whole[t:]


def test_in_flight_chunks_of_another_length_are_dropped_and_named(length):
    """Control: in a run with one length nothing is dropped."""
    length(1)
    before, state = trainer("tau 3")
    *_, state = steps(before, state, until=8)
    layout = SavedLayout(**before.note(state), same_rules=True)
    assert before.reading(layout).lines(8) == []
    assert "flight" in saved_state.abstract_items(before, layout)
    length(2)
    now, _ = trainer("tau 3")
    (line,) = now.reading(layout).lines(8)
    assert "0 (sent after step 6), 1 (sent after step 8)" in line
    wanted = saved_state.abstract_items(now, layout)
    assert "flight" not in wanted
    items = before.saved_items(state)
    state = now.reading(layout).state_of({name: items[name] for name in wanted}, t=8)
    assert state.dropped_until == 8
    assert [x.shape for x in state.outgoing] == [x.shape for x in now.layout.state.outgoing]
