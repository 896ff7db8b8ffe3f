"""dcn/bytes_sent against compiled CPU programs of two and four slices of four devices.

tests/integration/test_tpu_overlap.py does the same with programs for TPU slices.
"""

import itertools
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiers import full

from maxdiloco import DiLoCo
from maxdiloco.config import config
from maxdiloco.engine import data_parallel
from maxdiloco.models.build import ModelSettings, build_model
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.planning.hlo import reader, traffic
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

ROOT = pathlib.Path(__file__).parents[2]
WIRES = ("float32", "bfloat16", "int8", "float4_e3m0", "int2", "topk")
# Of one value, with its share of the scale of a block of 256.
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256, "float4_e3m0": 0.5 + 1 / 256}
BYTES |= {"int2": 0.25 + 2 / 256, "topk": 13 / 256}
ITEM = {"float32": 4, "bfloat16": 2, "int8": 1, "float4_e3m0": 1, "int2": 1, "topk": 1}
LARGEST = 2 * 128 * 1536  # values of a fragment of two layers; it rides two steps


@pytest.fixture(scope="module")
def cases():
    """{(M, in-slice axis, wire): what tests/bytes_sent.py measured}."""
    options = dict(cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    program = [sys.executable, ROOT / "tests" / "bytes_sent.py"]
    done = subprocess.run(program, check=True, **options)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(row["M"], row["axis"], row["wire"]): row for row in rows}
    assert set(found) == set(itertools.product((2, 4), ("data", "fsdp"), WIRES))
    return found


@pytest.mark.parametrize("axis", ["data", "fsdp"])
@pytest.mark.parametrize("M", [2, 4])
@pytest.mark.parametrize("wire", WIRES)
def test_bytes_sent_is_what_the_compiled_exchange_moves(cases, wire, M, axis):
    """All-gathers across slices alone, M of devices 4 m to 4 m + 3: of device i of every slice.
    Sends at 2, 4 and 6, the last of which needs one chunk: of steps 7 to 12 all but the eighth
    carry one. Each byte of a payload leaves a slice once for every other slice, of leaves
    that four devices hold alike (data) and of leaves they share (fsdp)."""
    found = cases[M, axis, wire]
    across = [[4 * m + i for m in range(M)] for i in range(4)]
    assert (found["kinds"], found["groups"]) == (["all-gather"], [across])
    sent = found["of_slice"]
    assert found["bytes_sent"] == [sent, 0, *[sent] * 4]
    tile = 4 * 1024 * ITEM[wire] * (M - 1)  # on each device of a slice
    payload = LARGEST * BYTES[wire] * (M - 1)
    assert payload <= 2 * sent <= payload + 2 * tile  # two chunks, both rounded up
    assert payload > tile  # else four times the payload would pass for rounding


@pytest.mark.parametrize("carrier", ["xla", "host"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("slots", "parameter"), [(2, 0.75), (4, 1.125), (8, 1.3125)])
def test_reduce_scatter_sends_half_a_byte_there_and_one_back(
    devices, slots, parameter, replicas, carrier
):
    """(M-1)/M of a parameter, for one replica a slot; two share what their slot sends back. Scales
    and padding are 2 % of it at most. Control: to gather (M-1)/2, more from four slots on."""
    mesh = jax.sharding.Mesh(np.array(devices[:slots]), ("diloco",))
    like = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {"w": jax.ShapeDtypeStruct((3, 1 << 20), np.float32, sharding=like)}
    options = dict(exchange_dtype="float4_e3m0", transport=carrier, mesh=mesh)
    options |= dict(num_replicas=replicas * slots, sync_period=10, overlap_steps=5)
    sent, values = {}, 3 << 20
    for exchange in ("reduce_scatter", "all_gather"):
        algorithm = DiLoCo(lambda p, o, b: (p, o, {}), collective=exchange, **options)
        algorithm.bind(params, ())
        sent[exchange] = sum(algorithm.bytes_sent(t) for t in range(21, 31)) / values
        algorithm.close()
    wanted = parameter * (0.5 + 1 / replicas) / 1.5
    assert wanted <= sent["reduce_scatter"] <= 1.02 * wanted
    assert (slots - 1) / 2 <= sent["all_gather"] <= 1.02 * (slots - 1) / 2


@pytest.mark.parametrize("slices, micro_batches", [full(2, 1), (4, 2)])
@pytest.mark.usefixtures("few_compiler_passes")
def test_data_parallelism_sends_the_gradients_of_each_micro_batch_by_a_ring(slices, micro_batches):
    """One device a slice. Besides the gradients, sums of a few numbers cross. The embedding is not
    tied, since XLA:CPU sums the two parts of a tied one apart."""
    keys = dict(enable_diloco="false", dcn_diloco_parallelism=slices, ici_fsdp_parallelism=1)
    keys |= dict(gradient_accumulation_steps=micro_batches, logits_via_embedding="false")
    keys |= dict(hardware="cpu", dataset_type="synthetic", vocab_size=32, base_emb_dim=16)
    keys |= dict(base_num_decoder_layers=1, base_mlp_dim=32, base_num_query_heads=2, head_dim=8)
    keys |= dict(base_num_kv_heads=2, max_target_length=16, per_device_batch_size=2)
    cfg = config.load([f"{key}={value}" for key, value in keys.items()], {})
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    parts = assemble.assemble(
        run_settings.read(cfg, mesh), mesh, total_steps=9, on_compile=lambda *_: None
    )
    ((program, args, *_),) = parts.trainer.calls(parts.batch)
    module = reader.read(program.compile(*args).as_text())
    found = [c for c in traffic.collectives(module, mesh.shape) if c.kind == "all-reduce"]
    assert {c.axes for c in found} == {("diloco",)}
    moved = sum(c.bytes_sent * c.times for c in found)
    claimed = parts.trainer.bytes_sent(1)
    assert claimed <= moved <= 1.01 * claimed
    gradients = sum(4 * x.size for x in jax.tree.leaves(parts.params))
    assert claimed == {2: 1, 4: 1.5}[slices] * micro_batches * gradients


@pytest.mark.parametrize(
    ("backend", "dtype", "item"),
    [("tpu", "auto", 2), ("gpu", "auto", 2), ("gpu", "float32", 4), ("cpu", "auto", 4),
     ("cpu", "bfloat16", 4)],
)  # fmt: skip
def test_gradients_are_summed_as_the_products_are_rounded(backend, dtype, item):
    """Compiled for two slices of v5e 1.08 times 2 bytes a parameter; XLA:CPU sums in float32. Of
    100 values three quarters leave one of four slices twice, for each of two micro-batches."""
    cfg = config.load(["model_name=tiny", f"dtype={dtype}"], {})
    found = build_model(
        ModelSettings.from_keys(cfg, backend=backend), backend=backend, compute_capability="9.0"
    ).gradient_dtype
    sent = data_parallel.gradient_bytes([np.zeros(100)], found, slices=4, accumulation=2)
    assert sent == 2 * 100 * item * 1.5
