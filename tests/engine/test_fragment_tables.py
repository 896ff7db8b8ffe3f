"""The fragment table of every model file: all parameters once, each layer where it belongs.

Shapes alone: nothing is allocated or compiled.
"""

import functools
import pathlib
import re

import jax
import numpy as np
import pytest
from run import output_of
from tiers import corner

import maxdiloco
from maxdiloco import train as train_program
from maxdiloco.config import config
from maxdiloco.diloco import fragments
from maxdiloco.engine import describe
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

MODEL_FILES = sorted((pathlib.Path(__file__).parents[2] / "configs/models").glob("*.yml"))
# (P, k); tiny has the fewest layers, 4; "each": a fragment for each layer.
COUNTS = [(1, 1), (2, 1), (4, 1), (5, 2), (5, 3), ("each", 1)]
WIRE = "float4_e3m0"
RUN = "hardware=cpu dataset_type=synthetic dcn_diloco_parallelism=2 ici_fsdp_parallelism=4"
FLAGS = [*RUN.split(), f"diloco_exchange_dtype={WIRE}"]
every_model_file = pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)


@functools.cache
def parts_of(name):
    """The parts of a run with a model file; built once, since that takes the time."""
    cfg = config.load([f"model_name={name}", *FLAGS], {})
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    return assemble.assemble(
        run_settings.read(cfg, mesh), mesh, total_steps=1, on_compile=lambda *_: None
    )


def layout_of(name, P, k=1, M=2, **options):
    """The layout of the same run cut into other fragments."""
    parts = parts_of(name)
    options |= dict(num_replicas=M, num_fragments=P, num_nonlayer_fragments=k)
    options |= dict(sync_period=100, exchange_dtype=WIRE)
    options |= dict(layer_axis=parts.model.layer_axis, mesh=parts.mesh)
    return maxdiloco.DiLoCo(lambda *_: None, **options).bind(parts.params, ())


def wire_bytes(layout):
    """Of each fragment, with the exchange inside programs."""
    return [plan.padded_bytes for plan in layout.plans]


def table_of(layout, sent=None):
    """[(fragment, layers, parameters, bytes, share, padding)] and what follows the table."""
    lines = describe.fragment_table(layout, sent or wire_bytes(layout))
    row = re.compile(r"(\d+) +(\S+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d.]+)%")
    rows = [row.fullmatch(line) for line in lines]
    assert lines[0].split() == "fragment layers parameters padding bytes sent share".split()
    number = lambda text: int(text.replace(",", ""))  # noqa: E731
    table = [
        (int(p), layers, number(n), number(b), float(share), number(filled))
        for p, layers, n, filled, b, share in (row.groups() for row in rows if row)
    ]
    return table, lines[1 + len(table) :]


def holders(params, plans):
    """For each leaf: how many fragments hold each entry of the dim that is cut; [1] if whole."""
    leaves = jax.tree.leaves(params)
    counts = [None] * len(leaves)
    for plan in plans:
        for s, start in zip(plan.slices, plan.starts, strict=True):
            i, whole = s.leaf, s.pattern == "whole"
            entries = 1 if whole else leaves[i].shape[s.axis]
            counts[i] = np.zeros(entries, int) if counts[i] is None else counts[i]
            regular = start + s.stride * np.arange(s.count)
            counts[i][0 if whole else start if s.pattern == "list" else regular] += 1
    return counts


@pytest.mark.parametrize("P, k", corner(COUNTS, COUNTS[-1:]))
@every_model_file
def test_the_table_of_every_model_file_holds_all_parameters_once(path, P, k):
    """Their number is the one worked out in the file's comment. Layer i lies in fragment
    k + i mod (P - k); fragments 0 to k - 1 hold no layer. Local or global, layers of a stack are
    equal."""
    expected = int(re.search(r"Parameters: ([\d,]+)", path.read_text())[1].replace(",", ""))
    parts = parts_of(path.stem)
    layers_in_all = parts.model.config.num_layers
    each = P == "each"
    P = layers_in_all + 1 if each else P
    layout = layout_of(path.stem, P, k)
    table, _ = table_of(layout)
    if each:
        assert len({row[2] for row in table[1:]}) == len(parts.model.config.stacks)
    assert [row[0] for row in table] == list(range(P))
    assert sum(row[2] for row in table) == expected
    assert all(np.all(count == 1) for count in holders(parts.params, layout.plans))
    for p, layers, parameters, sent, share, _ in table:
        assert share == pytest.approx(100 * parameters / expected, abs=0.051)
        # Four devices each round a chunk up to 1024 elements; blocks and flags at their ends.
        least = parameters * 129 / 256  # float4_e3m0: 128 bytes of codes, 1 of scale a block
        assert least <= sent <= least + 4 * (1024 + 8 * len(jax.tree.leaves(parts.params)))
        if P == 1:
            assert layers == "all"
        elif p < k:
            assert layers == "none"
        else:
            strided = ",".join(map(str, range(p - k, layers_in_all, P - k)))
            assert layers == (strided if P - k > 1 else f"0-{layers_in_all - 1}")


@every_model_file
def test_the_number_of_programs_does_not_grow_with_the_number_of_fragments(path):
    """Fragments of equal form share theirs: one more layer or one less, and what is no layer,
    with k > 1 with and without the leaves that are not split, and one row more or less. With dense
    layers before those of experts, each of these with none, one or more of the dense ones."""
    parts = parts_of(path.stem)
    layers, stacks = parts.model.config.num_layers, len(parts.model.config.stacks)

    def programs(P, k, sequential):
        counts = dict(num_fragments=P, num_nonlayer=k, sequential=sequential)
        found = fragments.partition(parts.params, parts.model.layer_axis, **counts)
        return len({tuple(s.form for s in fragment.slices) for fragment in found})

    for sequential in (False, True):
        counts = [programs(P, 1, sequential) for P in range(2, layers + 2)]
        assert max(counts) <= 3 * stacks
        assert programs(layers + 3, 3, sequential) <= 4 + stacks


def test_bytes_that_only_fill_chunks_are_padding():
    """tiny in 5 fragments: the embedding's 49,152 + 128 values and a layer's 246,080. With chunks
    of one length the first is filled up to the others; without padding a value takes its 129/256
    bytes, and each device's blocks of a leaf end with up to 128 more."""
    layout = layout_of("tiny", 5)
    longest = max(wire_bytes(layout))
    table, _ = table_of(layout, [longest] * 5)
    for _, _, parameters, sent, _, padding in table:
        assert sent == longest
        least = parameters * 129 / 256
        leaves = len(jax.tree.leaves(parts_of("tiny").params))
        assert least <= sent - padding <= least + 4 * leaves * (1 + 128)
    assert table[0][5] > 3 * table[1][5], "the smallest is filled up most"
    exact = [plan.unpadded_bytes for plan in layout.plans]
    assert [row[5] for row in table_of(layout, exact)[0]] == [0] * 5


def test_a_fragment_far_above_the_others_is_named_with_its_bytes():
    """35m: the embedding is 47% of it. Control: cut in two by rows it is not."""
    layout = layout_of("35m", 5)
    table, (line,) = table_of(layout)
    assert f"fragment 0 sends {table[0][3]:,} bytes" in line and "num_nonlayer_fragments" in line
    layout = layout_of("35m", 5, 2)
    assert table_of(layout)[1] == []


def test_show_fragments_prints_the_table_and_writes_nothing(tmp_path):
    flags = "model_name=tiny enable_streaming_diloco=true num_diloco_fragments=5"
    flags = [*FLAGS, *flags.split(), f"base_output_directory={tmp_path}/runs"]
    flags += ["num_nonlayer_fragments=2", "show_fragments=true"]
    shown = output_of(train_program.main, *flags).splitlines()
    layout = layout_of("tiny", 5, 2)
    table = describe.fragment_table(layout, wire_bytes(layout))
    assert shown[-len(table) :] == table
    assert not any("compiled" in line for line in shown)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overlap", "numbers"), [("none", ["2.0", "1.0"]), ("eager", ["7.9", "4.0"])]
)
def test_the_outer_state_is_logged_with_its_memory(overlap, numbers):
    """tiny: theta and momentum of 1,033,600 values of 4 bytes, a quarter on each device of a slice,
    and its norms, 1,408 values, on every one; eager has one of each for the 4 of a slice."""
    layout = layout_of("tiny", 1, M=8, round_overlap=overlap)
    line = describe.memory_lines(layout)[0]
    assert line.startswith("outer state") and re.findall(r"([\d.]+) MiB", line) == numbers


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_memory_beyond_plain_training_is_logged(memory):
    """tiny in 4 bits, a quarter of 1,033,600 values on each device, the norms' 1,408 on all: theta
    and momentum 2 * 4 bytes, residuals 4; tau=1: three times the codes, half a byte and a scale
    for each 256."""
    layout = layout_of("tiny", 1, overlap_steps=1, outer_memory=memory, error_feedback=True)
    line = describe.resident(layout)
    assert re.findall(r"\d\.\d", line) == ["2.0", "0.4", "1.0"], "outer state, in flight, residuals"
    assert line.count("pinned_host") == (1 if memory == "pinned_host" else 0)
