"""remat_policy=auto on one CPU device whose memory is said to be this or that."""

import functools
import math
import time
import types

import jax
import numpy as np
import pytest

from maxdiloco.config import config
from maxdiloco.engine.calls import Call, memory_of
from maxdiloco.models.remat import POLICIES
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble, remat_choice
from maxdiloco.run import settings as run_settings

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

FLAGS = (
    "hardware=cpu dataset_type=synthetic dcn_diloco_parallelism=1 base_num_decoder_layers=2 "
    "base_emb_dim=32 base_mlp_dim=256 max_target_length=128 vocab_size=128"
).split()


@pytest.fixture
def choose(devices):
    """(policy, lines for the user, policies that were compiled)."""

    def choose(*argv, memory, mesh=None):
        cfg = config.load([*FLAGS, *argv], {})
        compiled, lines = [], []
        mesh = mesh or mesh_lib.build(run_settings.read_mesh(cfg))
        chosen, parts = remat_choice.build(
            run_settings.read(cfg, mesh), functools.partial(parts_of, compiled=compiled), mesh,
            memory=memory, say=lines.append,
        )  # fmt: skip
        policy = chosen.model.config.remat_policy
        assert parts.model.config.remat_policy == policy
        return policy, lines, list(dict.fromkeys(compiled))

    return choose


def settings_of(*argv):
    cfg = config.load([*FLAGS, *argv], {})
    return run_settings.read(cfg, mesh_lib.build(run_settings.read_mesh(cfg)))


def parts_of(settings, compiled):
    mesh = mesh_lib.build(run_settings.read_mesh(settings.config))
    policy = settings.model.config.remat_policy
    on_compile = lambda *_: compiled.append(policy)  # noqa: E731
    return assemble.assemble(settings, mesh, total_steps=1, on_compile=on_compile)


@functools.cache
def needed(policy):
    """Bytes of the plain step and the rest of the state, and those kept for the backward pass."""
    parts = parts_of(settings_of(f"remat_policy={policy}"), [])
    call = parts.trainer.calls(parts.batch)[0]
    memory = memory_of(call.program.compile(*call.args), call, parts.trainer.abstract_state)
    return memory.needed, remat_choice.kept_bytes(parts, 1)


def test_policies_stand_from_least_computed_to_least_memory():
    policies = ("none", "minimal", "full")
    of_all = (parts_of(settings_of(f"remat_policy={each}"), []) for each in policies)
    kept = [remat_choice.kept_bytes(parts, 1) for parts in of_all]
    assert sorted(kept, reverse=True) == kept and len(set(kept)) == 3
    assert list(POLICIES)[0] == "none"
    assert remat_choice.TRIED == tuple(POLICIES)[1:]
    assert remat_choice.LAST == "full"


def test_the_first_policy_that_fits_is_chosen_or_else_full(choose):
    """The caller reports a program that does not fit."""
    policy, (first, *_, line), compiled = choose(memory=needed("minimal")[0])
    assert (policy, compiled) == ("minimal", ["minimal"])
    assert first.startswith("remat_policy=auto: ") and "minimal" in first
    assert line.startswith("remat_policy=auto: minimal; ")
    policy, (line,), compiled = choose(memory=1)
    assert (policy, compiled) == ("full", []) and line.startswith("remat_policy=auto: full")


def gpus(**shape):
    devices = np.array([types.SimpleNamespace(platform="gpu")])
    return types.SimpleNamespace(devices=devices, shape=shape)


GPU = gpus(diloco=2, data=2, fsdp=1)


@pytest.mark.full
def test_a_policy_that_cannot_fit_is_not_compiled(choose):
    """A tenth of a GPU's memory is left. A GPU with whole weights keeps everything that fits."""
    enough, kept = needed("minimal")
    assert "minimal" not in choose(memory=kept - 1)[2]
    assert "minimal" in choose(memory=kept)[2]
    enough, most = math.ceil(enough / 0.9) + 1, math.ceil(needed("none")[0] / 0.9) + 1
    policy, (line,), _ = choose(memory=enough, mesh=GPU)
    assert policy == "minimal" and " 0.9 of the GPU's" in line
    assert choose(memory=enough - 2, mesh=GPU)[0] != "minimal"
    assert choose(memory=enough - 2)[0] == "minimal"
    found = [choose(memory=most, mesh=mesh)[0] for mesh in (GPU, gpus(diloco=2, fsdp=2), None)]
    assert found == ["none", "minimal", "minimal"]


@pytest.mark.parametrize(
    ("argv", "keys", "policy", "num_lines"),
    [
        ((), dict(memory=None, mesh=GPU), "full", 1),
        ((), dict(memory=None), "save_context", 1),
        (("remat_policy=save_context",), dict(memory=1), "save_context", 0),
    ],
)
def test_a_policy_that_needs_no_measurement_compiles_nothing(choose, argv, keys, policy, num_lines):
    found, lines, compiled = choose(*argv, **keys)
    assert (found, len(lines), compiled) == (policy, num_lines, [])


def test_a_step_that_the_compiler_refuses_does_not_fit(monkeypatch):
    """The other compile is still waited for. Control: another error is raised."""

    def needed_by(*compiles):
        """What _needed says of steps with these bodies; each gives its bytes."""
        tokens, of = jax.ShapeDtypeStruct((1,), np.int32), types.SimpleNamespace
        programs = [of(name="inner", lowered=lambda _, body=body: body) for body in compiles]
        calls = [Call(program, (tokens,), 1) for program in programs]
        trainer = of(calls=lambda batch: calls, abstract_state=None)
        parts = of(batch={"tokens": tokens}, trainer=trainer, mesh=None)
        return remat_choice._needed(settings_of(), parts, 9, lambda line: None, None)

    monkeypatch.setattr(remat_choice, "kept_bytes", lambda *_: 0)
    given = lambda compiled, *_: types.SimpleNamespace(needed=compiled)  # noqa: E731
    monkeypatch.setattr(remat_choice, "memory_of", given)
    ended = []

    def refused(status):
        raise jax.errors.JaxRuntimeError(f"{status}: Too big.")

    def other():
        time.sleep(0.2)
        ended.append(True)
        return 3

    assert needed_by(lambda: refused("RESOURCE_EXHAUSTED"), other) == math.inf
    assert ended
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        needed_by(lambda: refused("INTERNAL"), lambda: 3)
