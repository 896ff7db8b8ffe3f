"""Runs compiled for GPUs that need not be there: what their programs have, what crosses slices."""

import functools
import re

import compile_tools
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_tools import PARAMETERS
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from run import names_key, output_of
from tiers import corner

from maxdiloco import plan
from maxdiloco.models.kernels import blockwise, cudnn, triton_grouped
from maxdiloco.models.kernels.blockwise import Scores
from maxdiloco.planning import topology

# The default tier has no cuDNN, so attention is plain.
KEYS = compile_tools.KEYS | dict(compile_topology="h100-2")
KINDS = ("a100-80gb", "h100", "b200", "l4")  # by shared memory and instructions


@pytest.mark.gpu_aot
def test_hosts_carry_the_exchange_and_steps_send_no_byte(compile_run):
    """Every parameter once a period, in float32, by the hosts of each slice."""
    (report,), run = compile_run()
    assert run.code == 0
    assert "4 x NVIDIA H100 80GB HBM3" in run.output and "of 60,756 MiB" in run.output
    assert report["dcn_bytes_per_device_and_step"] == 0
    sent = report["dcn_bytes_by_hosts_per_slice_and_period"]
    assert 4 * PARAMETERS <= sent <= 4 * PARAMETERS + 128  # and a few flags
    assert f"{sent:,.0f} bytes a period" in run.output
    steps = [program for program in report["programs"] if program["when"] == "step"]
    assert len(steps) > 1 and not any(program["dcn"] for program in steps)
    inner = next(program for program in steps if program["name"] == "inner")
    assert inner["estimated_seconds"] is None
    assert {row["axes"][0] for row in inner["ici"]} == {"fsdp"}


@pytest.mark.gpu_aot
def test_an_exchange_inside_the_programs_is_in_the_table(compile_run):
    """The control of the absence above: two devices a slice share what is sent, 4 bits each and
    the scales of blocks of 256."""
    keys = dict(diloco_transport="xla", diloco_exchange_dtype="float4_e3m0")
    (report,), run = compile_run(**keys)
    assert run.code == 0
    assert report["dcn_bytes_by_hosts_per_slice_and_period"] == 0
    (program,) = [p for p in report["programs"] if p["when"] == "step" and p["dcn"]]
    assert program["name"].startswith("synchronise")
    sent = sum(row["bytes_per_slice"] for row in program["dcn"] if row["dtype"] == "u8")
    assert PARAMETERS // 2 <= sent <= 1.05 * PARAMETERS // 2
    assert report["dcn_bytes_per_device_and_step"] > 0


@pytest.mark.full
@pytest.mark.gpu_aot
def test_a_model_that_does_not_fit_is_refused_with_more_gpus(compile_run):
    """4.3 billion parameters of feed-forward on GPUs of 40 GB, two a slice."""
    (report,), run = compile_run(
        base_emb_dim=16384, base_mlp_dim=65536, compile_topology="a100-40gb-2", remat_policy="full"
    )
    assert run.code == 1
    assert not report["verdict"]["fits"]
    assert re.search(r"by arithmetic a100-40gb-\d+ would do", run.output)
    assert names_key(run.errors, "diloco_outer_memory")


@pytest.mark.full
@pytest.mark.gpu_aot
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_cudnns_and_has_no_weights_of_every_head(kind):
    """With its gradients. Documents by a mask, which is one for all heads, and where the GPU takes
    them by their offsets: one a window, and two rooms for more. Control: blocks of plain
    attention's logits, by head."""
    B, L, N, K, H = 2, 1024, 16, 8, 64
    lies = NamedSharding(Mesh(np.array(topology.devices(f"{kind}-1", 1)), ("x",)), P())
    dims = {(B, L, N, H): jnp.bfloat16, (B, L, K, H): jnp.bfloat16, (B, L): jnp.int32}
    q, k, segments = (jax.ShapeDtypeStruct(*one, sharding=lies) for one in dims.items())

    def compiled(kernel):
        def total(*arrays):
            return kernel(Scores(8.0), *arrays).astype(jnp.float32).sum()

        gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        return gradient.lower(q, k, k, segments).compile()

    masks = 5 * B * L * L * 2  # made, laid out, and what is of heads
    assert compiled(blockwise.attention).memory_analysis().temp_size_in_bytes > masks
    for by_offsets in {False, kind in ("h100", "b200")}:
        fused = compiled(functools.partial(cudnn.attention, by_offsets=by_offsets))
        calls = fused.as_text().count('custom_call_target="__cudnn$fmha')
        assert calls == (8 if by_offsets else 2)
        assert fused.memory_analysis().temp_size_in_bytes < masks


@pytest.mark.gpu_aot
@pytest.mark.parametrize("kind", corner(KINDS, ["h100"]))
def test_products_of_experts_fit_every_gpu_and_leave_other_rows_out(kind):
    """Memory for nothing but what goes in and out; XLA's own has every row for every expert."""
    A, E, D, F = 16384, 128, 2048, 768  # Qwen3 30B-A3B
    mesh = Mesh(np.array(topology.devices(f"{kind}-1", 1)), ("x",))
    sharding = NamedSharding(mesh, P())

    def struct(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def temporary(fn):
        args = struct(A, D), struct(E, D, F), struct(E, dtype=jnp.int32), struct(A, F)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # as models are, for their GPU
            return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes

    def by_triton(x, w, sizes, d):
        product = triton_grouped.rows_by_matrices
        dx = product(d, w, sizes, transposed=True)
        return product(x, w, sizes), dx, triton_grouped.matrices_gradient(x, d, sizes, w.dtype)

    assert temporary(by_triton) < 2**20
    if kind == "h100":
        assert temporary(lambda x, w, sizes, d: jax.lax.ragged_dot(x, w, sizes)) > 2 * A * E * D


@pytest.mark.full
@pytest.mark.gpu_aot
@pytest.mark.parametrize("more", [{}, dict(num_experts=4, num_experts_per_tok=2)])
def test_a_gpu_too_old_for_cudnn_has_programs(compile_run, more):
    """A T4; what its users may not ask for is in tests/models/test_attention.py."""
    (report,), run = compile_run(compile_topology="t4-2", **more)
    assert run.code == 0
    assert "mesh: 4 x Tesla T4" in run.output
    assert report["verdict"]["fits"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("diloco_outer_memory", "pinned_host"),
        ("max_exposed_fraction", "2"),
        ("optimizer_memory_host_offload", "true"),
    ],
)
def test_a_compile_without_gpus_refuses_by_key(compile_run, tmp_path, monkeypatch, key, value):
    monkeypatch.chdir(tmp_path)
    _, run = compile_run(**{key: value})
    assert run.code == 2 and names_key(run.error, key)


@pytest.mark.gpu_aot
def test_mesh_sizes_over_slices_have_to_match_the_topology(compile_run):
    _, run = compile_run(dcn_diloco_parallelism=4)
    assert run.code == 2 and "diloco 4" in run.error


def test_a_plan_for_gpus_estimates_a_step_time_unless_it_is_set():
    argv = ["model_name=1b", "compile_topology=h100-8", "compile_topology_num_slices=2",
            "dcn_bandwidth_gbps=0.2"]  # fmt: skip
    said = output_of(plan.main, *argv)
    assert "(a guess: 40% of the peak" in said
    said = output_of(plan.main, *argv, "step_time=0.3")
    assert "(as given)" in said
    lines = said.partition("run it:")[2].splitlines()
    (run,) = [line for line in lines if "maxdiloco.train " in line]
    assert "hardware=gpu" in run and "pinned_host" not in run
    assert any("maxdiloco.train_compile" in line for line in lines)


def test_a_plan_prints_no_command_that_absent_gpus_refuse():
    """1b on two T4 a slice fits only with its outer state in host memory."""
    argv = ["model_name=1b", "compile_topology=t4-2", "compile_topology_num_slices=2",
            "dcn_bandwidth_gbps=1", "step_time=0.8"]  # fmt: skip
    said = output_of(plan.main, *argv)
    assert "diloco_outer_memory=pinned_host" in said.partition("run it:")[2]
    assert "maxdiloco.train_compile" not in said
