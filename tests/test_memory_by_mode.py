"""benchmarks/memory_by_mode.py: what a mode may add; programs that are alike compile once."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import memory_by_mode
from maxdiloco.engine.calls import Call
from maxdiloco.flags import config
from maxdiloco.parallel.program import Program

MIB = 2**20
COUNT = MIB // 4  # float32 of one MiB


def parts(names, told=lambda name: None, kept_mib=8):
    """Of a run whose programs multiply one MiB each, beside `kept_mib` of other state; one
    named in capitals gives two. told: is called with the name of what is compiled."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x, state = (
        jax.ShapeDtypeStruct((COUNT * mib,), jnp.float32, sharding=sharding)
        for mib in (1, kept_mib)
    )

    def program(i, name):
        def scaled(x):
            return jnp.concatenate([x] * (1 + name.isupper())) * (i + 2)

        return Program(name, scaled, on_compile=lambda name, *_: told(name))

    calls = [Call(program(i, name), (x,), 1) for i, name in enumerate(names)]
    plans = [SimpleNamespace(fragment=SimpleNamespace(size=mib * 2 * COUNT)) for mib in (3, 5)]
    trainer = SimpleNamespace(
        calls=lambda batch: calls,
        abstract_state=[x, state],
        layout=SimpleNamespace(plans=plans),
    )
    mesh = SimpleNamespace(size=4, shape={"diloco": 2})
    return SimpleNamespace(trainer=trainer, batch=None, mesh=mesh)


def test_a_mode_may_add_its_largest_fragment_and_five_percent():
    """Two MiB of a program and 8 that the run keeps; a fragment of 10 MiB on two devices."""
    found = memory_by_mode.row(parts("a"), 4 * MIB, {})
    assert found == ("10", "a", "6", "5", "5")
    assert memory_by_mode.row(parts("a"), 100 * MIB, {})[-1] == "10"


def test_a_mode_needs_what_its_largest_program_needs():
    found = memory_by_mode.needed(parts("aBc"), {})
    assert found == (11 * MIB, "B")


def test_programs_that_are_alike_are_compiled_once():
    """The second run's first program is the first run's; its state is counted for itself."""
    told, compiled = [], {}
    first, _ = memory_by_mode.needed(parts("a", told.append), compiled)
    second, _ = memory_by_mode.needed(parts("ab", told.append, kept_mib=9), compiled)
    assert told == ["a", "b"] and second - first == MIB


@pytest.mark.parametrize("mode", memory_by_mode.modes(3))
def test_the_keys_of_every_mode_are_taken(mode):
    keys = memory_by_mode.modes(3)[mode]
    cfg = config.load(["dataset_type=synthetic", *(f"{k}={v}" for k, v in keys.items())], {})
    assert {name: cfg.as_dict()[name] for name in keys} == keys
    assert ("4 bits" in mode) == (cfg.diloco_exchange_dtype == "float4_e3m0")
    assert ("tau 1" in mode) == (cfg.num_communication_overlapping_steps == 1)
