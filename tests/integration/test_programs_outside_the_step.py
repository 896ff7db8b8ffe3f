"""Start, watch, evaluation, saved parameters: programs like those of the steps, known before a run.

They are traced for every model, compiled for TPU slices with the outer state in either memory, and
never need more memory than a step. Memory of a merge does not grow with the replicas.
"""

import dataclasses
import functools
import gc
import itertools
import logging
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_programs
from run import train
from tiers import corner

from maxdiloco import DiLoCo
from maxdiloco.config import config
from maxdiloco.diloco.fragments import Vocabulary
from maxdiloco.engine.calls import Call
from maxdiloco.metrics.compile_log import CompileLog
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.planning import program_costs, topology
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

# Layers of one kind, of two, beside dense ones, with experts; the largest last.
MODELS = ("tiny", "peer25m", "1b", "10b", "gemma3-1b", "llama3-70b", "deepseek-v3")


def parts_of(*, devices=None, **keys):
    keys = dict(dataset_type="synthetic", eval_interval=10) | keys
    cfg = config.load([f"{key}={value}" for key, value in keys.items()], {})
    mesh = mesh_lib.build(run_settings.read_mesh(cfg), devices)
    keys = run_settings.read(cfg, mesh)
    return keys, assemble.assemble(keys, mesh, total_steps=10, on_compile=lambda *_: None)


def measured(parts, calls):
    """Programs of two slices that hold one replica each."""
    one_slice = {axis: 1 for axis in mesh_lib.AXES if axis != "diloco"}
    return program_costs.measure(
        calls,
        parts.trainer.abstract_state,
        mesh=parts.mesh,
        dcn={"diloco": 2} | one_slice,
        chip=None,
        gbps=25.0,
        say=lambda line: None,
    )


def bytes_across(parts, calls):
    """Bytes that a device sends to the other slice in each program."""
    found = measured(parts, calls)
    return [sum(c.bytes_sent for c in one.crossings) for one in found]


@pytest.mark.parametrize("model", corner(MODELS, ["1b"]))
def test_every_program_of_a_model_traces(devices, model):
    """Sizes above 2^31 elements among them. Control: the trees have as many values as the name
    says, give or take a half."""
    cfg, parts = parts_of(
        devices=devices,
        model_name=model,
        dcn_diloco_parallelism=2,
        ici_fsdp_parallelism=4,
        diloco_round_overlap="eager",
    )
    seen = {}
    for call in assemble.calls(cfg, parts):
        seen[call.program.name.partition(" [")[0]] = call.program.out_shapes(*call.args)
    names = {"inner", "inner + exchange", "eager_step", "watch", "evaluate", "init"}
    assert set(seen) == names
    theta = sum(x.size for x in jax.tree.leaves(parts.params))
    assert sum(x.size for x in jax.tree.leaves(seen["init"].params)) == 2 * theta
    if model[0].isdigit():
        named = float(model[:-1]) * {"m": 1e6, "b": 1e9}[model[-1]]
        assert 0.5 < theta / named < 1.5


SMALL = dict(
    base_emb_dim=256,
    base_num_decoder_layers=2,
    base_mlp_dim=512,
    base_num_query_heads=2,
    base_num_kv_heads=2,
    head_dim=128,
    vocab_size=1024,
    max_target_length=512,
    attention="dot_product",
    mlp_activations="[gelu]",
    gradient_accumulation_steps=8,
    per_device_batch_size=2,
    opt_type="sgd",  # compiles in half the time
    adam_weight_decay=0,
    gradient_clipping_threshold=0,
)
TWO_SLICES = dict(max_target_length=16, base_emb_dim=32, base_mlp_dim=32, vocab_size=32)
TWO_SLICES |= dict(hardware="cpu", dcn_diloco_parallelism=2, ici_fsdp_parallelism=2)


# What crosses slices is decided before the passes that are left out.
@pytest.mark.usefixtures("few_compiler_passes")
def test_no_program_of_a_log_step_sends_to_another_slice(devices):
    """A log step runs the inner step and the watch, as every step does, and no other program: see
    below what a run compiles. Control: a chunk of an exchange crosses, beside the inner step."""
    keys = dict(num_communication_overlapping_steps=1, enable_checkpointing="false")
    cfg, parts = parts_of(devices=devices[:4], **SMALL | TWO_SLICES | keys, eval_interval=-1)
    calls = {call.program.name.partition(" [")[0]: call for call in assemble.calls(cfg, parts)}
    assert set(calls) == {"inner", "inner + exchange", "pack", "merge", "watch", "init"}
    inner, watch, exchange = bytes_across(
        parts, [calls[name] for name in ("inner", "watch", "inner + exchange")]
    )
    assert inner == watch == 0 < exchange


@pytest.mark.parametrize(
    "keys, programs",
    [
        (dict(), []),
        (dict(num_diloco_replicas=4), ["outer parameters of a slice"]),
        (dict(diloco_outer_memory="pinned_host"), ["outer parameters of a slice"]),
    ],
    ids=["one replica a slice", "two", "in host memory"],
)
@pytest.mark.usefixtures("few_compiler_passes")
def test_an_evaluation_and_a_save_of_an_eager_run_stay_in_a_slice(devices, keys, programs):
    """A save runs no program: its items are what the state has. Control: the mean of all thetas,
    which `outer_params` gives a library user, crosses."""
    keys = SMALL | TWO_SLICES | dict(diloco_round_overlap="eager") | keys
    cfg, parts = parts_of(devices=devices[:4], **keys)
    trainer = parts.trainer
    calls = [c for c in assemble.calls(cfg, parts) if c.when == "outside"]
    assert [c.program.name for c in calls] == ["watch", *programs, "evaluate"]
    like = trainer.abstract_state
    control = Call(trainer.exported.mean, (like.outer,), 1, "outside")
    *nothing, crossing = bytes_across(parts, [*calls, control])
    assert set(nothing) == {0} and crossing > 1000
    in_state = {id(x) for x in jax.tree.leaves(like)}
    assert all(id(x) in in_state for x in jax.tree.leaves(trainer.checkpoint(like)[0]))


OUTER_MODES = {
    "at once": dict(),
    "overlapped": dict(overlap_steps=1, exchange_dtype="float4_e3m0"),
    "delayed": dict(round_overlap="delayed"),
    "eager": dict(round_overlap="eager"),
}
CUTS = {"stride": (4, 4), "list": (5, 4), "run": (4, 6)}  # layers, fragments
GRID = itertools.product(["device", "pinned_host"], OUTER_MODES, CUTS)


@pytest.mark.full  # test_tpu_overlap.py has one in the default tier
@pytest.mark.tpu_aot
@pytest.mark.parametrize(("memory", "mode", "pattern"), [*GRID])
def test_the_outer_state_compiles_for_tpu_in_either_memory(memory, mode, pattern):
    """Leaves of every kind: rows of the vocabulary, and matrices and vectors of layers that lie in
    strides, alone or anyhow."""
    mesh, (layers, fragments) = tpu_programs.mesh_of(2), CUTS[pattern]
    struct = functools.partial(tpu_programs.struct, mesh)
    params = {
        "embedding": struct((250, 128), None, "fsdp"),
        "scale": struct((layers, 128)),
        "w": struct((layers, 256, 128), None, "fsdp", None),
    }
    algorithm = DiLoCo(
        tpu_programs.tiny_step,
        num_replicas=2,
        sync_period=8,
        num_fragments=fragments,
        num_nonlayer_fragments=2,
        layer_axis={"embedding": Vocabulary(0), "scale": 0, "w": 0},
        mesh=mesh,
        outer_memory=memory,
        **OUTER_MODES[mode],
    )
    algorithm.bind(params, params)
    assert {s.pattern for s in algorithm.layout.plans[-1].slices} == {pattern} or layers == 5
    evaluation = algorithm.evaluated.calls(algorithm.abstract_state, 1)
    for call in [*algorithm.calls(struct((2, 8), "diloco", "fsdp")), *evaluation]:
        if not call.program.name.startswith("inner"):
            call.program.compile(*call.args)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(algorithm.layout.state.outer)}
    assert kinds == {memory}


@pytest.mark.tpu_aot
@pytest.mark.full
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_start_and_evaluation_need_no_more_memory_than_a_step(memory):
    """An evaluation reads the rows of a micro-batch. Control: all rows of the step at once, as with
    one micro-batch, need more."""
    devices = topology.devices("v5e-4", 2)

    def needed(*names, **keys):
        cfg, parts = parts_of(devices=devices, **SMALL | dict(diloco_outer_memory=memory) | keys)
        calls = [call for call in assemble.calls(cfg, parts) if call.program.name in names]
        return [one.memory.needed for one in measured(parts, calls)]

    inner, evaluate, init = needed("inner", "evaluate", "init")
    assert init <= inner and evaluate <= inner
    if memory == "device":  # an evaluation is the same program whatever memory theta is kept in
        (at_once,) = needed("evaluate", gradient_accumulation_steps=1, per_device_batch_size=16)
        assert at_once - init > 1.5 * (evaluate - init)  # init needs little beside the state


@pytest.mark.tpu_aot
def test_memory_of_a_merge_does_not_grow_with_the_replicas():
    """Besides the payloads themselves, which are arguments. 2 and 8 slices of four chips, 33 MiB of
    float32 on each: all replicas decoded at once would take 268 MiB with eight."""
    temporary = []
    for slices in (2, 8):
        mesh = tpu_programs.mesh_of(slices)
        params = {"w": tpu_programs.struct(mesh, (8, 2048, 2048), None, "fsdp", None)}
        algorithm = DiLoCo(
            tpu_programs.tiny_step,
            num_replicas=slices,
            sync_period=4,
            overlap_steps=1,
            exchange_dtype="float4_e3m0",
            mesh=mesh,
        )
        algorithm.bind(params, params)
        batch = tpu_programs.struct(mesh, (slices, 8), "diloco")
        (merge,) = [c for c in algorithm.calls(batch) if c.program.name.startswith("merge")]
        memory = merge.program.compile(*merge.args).memory_analysis()
        temporary.append(memory.temp_size_in_bytes / 2**20)
    assert temporary[1] < temporary[0] + 33 / 2


def test_a_synchronisation_does_not_wait_for_the_one_before_it():
    """A step with a send reads the flags from before the last synchronisation, never its own."""
    algorithm = DiLoCo(
        lambda p, o, b: (jax.tree.map(lambda x: x + 1, p), o, {}), num_replicas=2, sync_period=1
    )
    state = algorithm.init({"w": jnp.zeros(3)}, ())
    state, _ = algorithm.step(state, np.zeros(2))
    before = types.SimpleNamespace(__array__=mock.Mock(return_value=np.zeros((2, 1), bool)))
    bad = state.bad
    state, _ = algorithm.step(dataclasses.replace(state, bad_before=before), np.zeros(2))
    assert before.__array__.call_count == 1
    assert state.bad_before is bad and not bad.is_deleted()


@pytest.mark.usefixtures("few_compiler_passes")
def test_nothing_compiles_after_the_first_step_begins(tmp_path, monkeypatch, caplog, request):
    """Evaluations, log steps, saves and their small change included. The trainer is bound once, and
    garbage is collected after the first step, not before."""
    ready, bound, collected = [], [], []
    whole, bind, step = CompileLog.compile_all, DiLoCo.bind, DiLoCo.step

    def compile_all(self, calls, **remedy):
        made = whole(self, calls, **remedy)
        ready.append(len(finished()))
        return made

    def observed_step(*args):
        collected.append(gc.isenabled())
        return step(*args)

    def finished():
        said = [record.getMessage() for record in caplog.records]
        return [line for line in said if line.startswith("Finished XLA compilation of")]

    monkeypatch.setattr(CompileLog, "compile_all", compile_all)
    monkeypatch.setattr(DiLoCo, "step", observed_step)
    monkeypatch.setattr(DiLoCo, "bind", lambda self, *args: bound.append(bind(self, *args)))
    request.addfinalizer(lambda: jax.config.update("jax_log_compiles", False))
    jax.config.update("jax_log_compiles", True)  # jax.log_compiles() is of this thread alone
    with caplog.at_level(logging.WARNING, logger="jax"):
        keys = dict(steps=9, log_period=2, eval_interval=3, eval_steps=2, checkpoint_period=4)
        assert train(tmp_path / "run", **keys).code == 0
    assert len(bound) == 1
    assert collected == [False] + 8 * [True] and gc.isenabled()
    assert ready and ready[0] >= 4  # the control: compiles are seen
    after = [line.partition("jit(")[2].partition(")")[0] for line in finished()[ready[0] :]]
    assert after == []
    assert (tmp_path / "run" / "checkpoints" / "8").is_dir()
