"""Whole runs compiled ahead of time for TPU slices of four chips; what crosses them, by hand."""

import json
import re

import compile_tools
import pytest
from compile_tools import BYTES, ENDS, LAYER, PARAMETERS
from run import names_key, output_of
from tiers import corner

from maxdiloco import plan, train_compile
from maxdiloco.config import config
from maxdiloco.planning import job, rating

pytestmark = pytest.mark.tpu_aot

KEYS = compile_tools.KEYS | dict(remat_policy="none", compile_topology="v5e-4")


def bytes_of_period(report):
    """Bytes that leave a slice in one period."""
    return sum(
        program["runs_per_period"] * cross["bytes_per_slice"]
        for program in report["programs"]
        if program["when"] == "step"
        for cross in program["dcn"]
    )


def table(run):
    """Bytes on the wire of each fragment, as printed."""
    lines = run.output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("fragment  ")) + 1
    rows = [line.split() for line in lines[first:]]
    rows = [row for row in rows if row and row[0].isdigit()]
    return [int(row[-2].replace(",", "")) for row in rows]


def refusals(run):
    """The lines of gates that fail, here the one of a slow link with tau 0, which exposes all."""
    found = [line for line in run.errors.splitlines() if line.startswith("refused: ")]
    assert all(names_key(line, "max_exposed_fraction") for line in found)
    return found


def streaming(fragments, tau, wire, **keys):
    return keys | dict(
        enable_streaming_diloco="true",
        num_diloco_fragments=fragments,
        num_communication_overlapping_steps=tau,
        diloco_exchange_dtype=wire,
    )


IN_TWO = dict(ici_fsdp_parallelism=2, ici_tensor_parallelism=2, max_exposed_fraction=0.01)
OF_FOUR = dict(compile_topology_num_slices=4, diloco_outer_memory="pinned_host")
SLOW = dict(max_exposed_fraction=0.05, dcn_bandwidth_gbps=0.5)
EAGER = dict(diloco_round_overlap="eager", diloco_exchange_dtype="bfloat16")
# The keys of each, and the values of its fragments.
MODES = {
    "vanilla": (dict(diloco_exchange_dtype="float32"), [PARAMETERS]),
    "streaming, tau 0": (streaming(2, 0, "float4_e3m0", **SLOW), [ENDS, 2 * LAYER]),
    "streaming, tau 1": (streaming(3, 1, "int8", dcn_bandwidth_gbps=0.01), [ENDS, LAYER, LAYER]),
    "streaming, tau 4, tensor": (streaming(2, 4, "float4_e3m0", **IN_TWO), [ENDS, 2 * LAYER]),
    "eager": (EAGER, [PARAMETERS]),
    "four slices, outer state on the host": (
        streaming(3, 1, "float4_e3m0", **OF_FOUR),
        [ENDS, LAYER, LAYER],
    ),
}


@pytest.mark.full
def test_one_slice_is_compiled_and_sends_nothing_to_another(compile_run):
    """Its devices have no slice_index; XLA prints its replica groups as axes of a mesh. Here
    remat_policy is chosen, by compiling the step."""
    (report,), run = compile_run(compile_topology_num_slices=1, remat_policy="auto")
    assert run.code == 0
    assert "4 x TPU v5 lite" in run.output
    assert not any(program["dcn"] for program in report["programs"])
    flag = "--xla_tpu_pcie_bandwidth_multiplier=0.00001"
    assert report["compiler_flags"]["LIBTPU_INIT_ARGS"] == flag
    assert "nothing" in run.output.splitlines()
    inside = run.output.partition("between the devices of a slice")[2].splitlines()
    assert "inner" in inside and any(" fsdp " in line for line in inside)


@pytest.mark.parametrize("mode", corner(MODES, ["streaming, tau 0"]))
def test_only_the_fragments_are_sent_between_slices(compile_run, mode):
    """Each value once to each other slice, whole tiles of 1024 a device and chunk; never a plain
    step, a pack, a merge or an outer step, and at a log step no metrics. A gate that fails, here
    that of a slow link, is exit code 1."""
    keys, fragments = MODES[mode]
    (report,), run = compile_run(**keys)
    assert run.code == bool(refusals(run)) == (mode == "streaming, tau 0"), run.errors
    others = keys.get("compile_topology_num_slices", 2) - 1
    assert bytes_of_period(report) == others * sum(table(run))
    wire = keys["diloco_exchange_dtype"]
    itemsize = {"float32": 4, "bfloat16": 2}.get(wire, 1)
    for size, sent in zip(fragments, table(run), strict=True):
        if size == max(fragments):  # the others are filled up to chunks of the same length
            least = size * BYTES[wire]
            chunks = int(KEYS["diloco_sync_period"]) if mode == "eager" else 5
            assert least <= sent <= 1.01 * least + 4 * 1024 * itemsize * chunks
    for program in report["programs"]:
        exchanges = program["name"].partition(" [")[0] in (
            "inner + exchange", "synchronise", "restore"
        )  # fmt: skip
        assert bool(program["dcn"]) == exchanges, program["name"]
        for cross in program["dcn"]:
            assert program["when"] != "step" or cross["padding_bytes"] == 0
            assert not cross["in_conditional"]
            assert cross["axes"] == ["diloco"]
    # What maxdiloco.plan says that a period waits, with the time of the compiled plain step.
    of_run = {key: (KEYS | keys)[key] for key in {*KEYS, *keys} - {*train_compile.OPTIONS}}
    cfg = config.load([f"{key}={value}" for key, value in of_run.items()], {})
    H, P = cfg.diloco_sync_period, cfg.num_diloco_fragments
    tau = cfg.num_communication_overlapping_steps
    candidate = job.Candidate(H, P, 1, tau, wire, cfg.diloco_round_overlap, P > 1)
    found = job.describe_job(cfg)
    (inner,) = [program for program in report["programs"] if program["name"] == "inner"]
    step_s, link = inner["estimated_seconds"], rating.Link(keys.get("dcn_bandwidth_gbps", 25.0))
    sent = rating.traffic(found, candidate)
    waited = rating.exposed_seconds(found, candidate, sent, step_s=step_s, link=link)
    # What `synchronise` computes itself hides some microseconds.
    assert waited == pytest.approx(report["dcn_exposed_seconds_per_period"], rel=0.03, abs=2e-5)
    assert waited > 0.01 or mode != "streaming, tau 1"


LIKE_LLAMA = dict(
    base_num_query_heads=4,
    mlp_activations="[silu,linear]",
    logits_via_embedding="false",
    attention="flash",
    max_target_length=512,
    per_device_batch_size=1,
    ici_context_parallelism=2,
)
EXPERTS = dict(
    num_diloco_replicas=4,
    base_num_decoder_layers=1,
    num_experts=4,
    num_experts_per_tok=2,
    base_moe_mlp_dim=128,
    ici_expert_parallelism=2,
    ici_fsdp_parallelism=2,
)


@pytest.mark.full
@pytest.mark.parametrize("keys", [LIKE_LLAMA, EXPERTS], ids=["context", "experts"])
def test_traffic_of_an_inner_step_stays_in_the_slice(compile_run, keys):
    """A Llama-like layer through splash attention: queries of 256 tokens meet keys of 512, sent in
    bfloat16; the gradients of the keys come back added up, and scattered. And two replicas on each
    of two slices, whose devices hold two of four experts each; each replica has kernels of its own,
    which no batch dim goes through. The exchange is the control."""
    (report,), run = compile_run(**keys)
    assert run.code == 0, run.errors
    programs = {program["name"].partition(" [")[0]: program for program in report["programs"]}
    inner = programs["inner"]
    assert not inner["dcn"] and programs["synchronise"]["dcn"]
    over = {(row["collective"], *row["axes"]): row["number"] for row in inner["ici"]}
    if keys is EXPERTS:
        assert {"expert", "fsdp"} <= {axis for _, *axes in over for axis in axes}
        assert inner["unknown_calls"] == {}
    else:
        assert over["all-gather bf16", "context"] == over["reduce-scatter bf16", "context"] == 4
        assert ("all-gather f32", "context") not in over


LATENT = dict(
    base_num_decoder_layers=1,
    head_dim=192,
    latent_attention="{kv_lora_rank: 32, qk_nope_head_dim: 128, qk_rope_head_dim: 64, "
    "v_head_dim: 128}",
    attention="flash",
    per_device_batch_size=1,
)


@pytest.mark.full
def test_a_report_on_latent_attention_knows_its_kernels(compile_run):
    """Splash attention with keys of 192 features and values of 128."""
    (report,), run = compile_run(**LATENT)
    assert run.code == 0, run.errors
    (inner,) = [program for program in report["programs"] if program["name"] == "inner"]
    assert inner["unknown_calls"] == {}
    assert inner["estimated_seconds"] > 0


def test_the_plan_compiles_only_the_plain_step(tmp_path):
    path = tmp_path / "plan.json"
    own = ("diloco_sync_period", "remat_policy")
    argv = [f"{key}={value}" for key, value in KEYS.items() if key not in own]
    argv += ["dcn_bandwidth_gbps=0.02", f"report={path}"]
    said = output_of(plan.main, *argv)
    assert re.findall(r"^compiled (\S+)", said, re.MULTILINE) == ["inner"]
    assert "remat_policy=auto: minimal" in said, "as a run chooses it"
    found = json.loads(path.read_text())
    assert 1e-5 < found["plain_step_seconds"] < 1
    # At least the state that the chip holds: 4 bytes a parameter in params, theta and momentum.
    assert min(row["memory_bytes"] for row in found["candidates"]) > 12 * (PARAMETERS) / 4
    assert "diloco_sync_period=" in " ".join(found["train_command"])


@pytest.mark.full
def test_data_parallel_is_reported_after_a_run_whose_gate_fails(compile_run):
    """Data parallelism sends the gradients in every step: of float32 each device's quarter once to
    the other slice, less what the compiler sends as bfloat16."""
    (diloco, data_parallel), run = compile_run(compile_data_parallel="true", **SLOW)
    (cross,) = diloco["programs"][1]["dcn"]
    assert cross["exposed_seconds"] > 0.9 * cross["link_seconds"] > 0
    assert run.code == len(refusals(run)) == 1
    assert "data parallel" in run.output
    assert 2 * PARAMETERS <= bytes_of_period(data_parallel) <= 1.2 * 4 * PARAMETERS


def test_a_program_too_big_for_the_chip_is_exit_code_1(compile_run):
    """9.7e9 parameters of 12 bytes with their moments, on four chips of 15.75 GiB."""
    (report,), run = compile_run(
        base_emb_dim=4096, base_mlp_dim=65536, base_num_decoder_layers=16, remat_policy="full"
    )
    assert run.code == 1
    assert any(program["too_big"] for program in report["programs"])
    assert "refused: inner is too big" in run.errors
    assert "v5e-" in run.errors, "the slice that would do"
    assert "remat_policy=full" not in run.errors, "which is already on"
    assert "between slices" in run.output and "not known: inner" in run.output


@pytest.mark.full
def test_the_1b_model_on_two_slices_of_sixteen(compile_run):
    """Real shapes: everything at once, in 4 bits and a scale for each 256 values."""
    (report,), run = compile_run(
        small=dict(model_name="1b", max_target_length=2048, dataset_type="synthetic"),
        diloco_exchange_dtype="float4_e3m0",
        compile_topology="v5e-16",
        compile_topology_num_slices=2,
        remat_policy="full",  # auto compiles the step with others before it
    )
    assert run.code == 0, run.errors
    (sent,) = table(run)
    assert bytes_of_period(report) == sent
    layer = 4 * 2048**2 + 2 * 2048 * 8192 + 2 * 2048 + 2 * 64
    least = BYTES["float4_e3m0"] * (24 * layer + 32768 * 2048 + 2048)
    assert least <= sent <= 1.001 * least
    assert all(program["memory"]["needed"] < report["hbm_bytes"] for program in report["programs"])
