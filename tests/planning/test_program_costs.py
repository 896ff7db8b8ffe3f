"""What is read off a compiled program, and what happens when it cannot be."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.calls import Call
from maxdiloco.errors import ConfigError
from maxdiloco.parallel.program import Program
from maxdiloco.planning import program_costs


@pytest.fixture
def mesh(devices):
    return Mesh(np.array(devices[:4]).reshape(2, 2), ("diloco", "fsdp"))


def struct(mesh, *shape):
    lies = NamedSharding(mesh, P("diloco", "fsdp"))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lies)


def measured(mesh, program, state, *args):
    (found,) = program_costs.measure(
        [Call(program, args, runs=3)],
        state,
        mesh=mesh,
        dcn={"diloco": 2, "fsdp": 1},
        chip=None,
        gbps=25.0,
        say=lambda line: None,
    )
    return found


def test_what_the_program_does_not_take_is_kept_elsewhere(mesh):
    """Three arrays of 8 * 16 float32 over four devices, 128 bytes each; the program takes one."""
    state = [struct(mesh, 8, 16) for _ in range(3)]
    program = Program("inner", lambda x: 2 * x, on_compile=lambda *_: None)
    found = measured(mesh, program, state, state[0])
    assert (found.name, found.runs, found.crossings) == ("inner", 3, ())
    assert found.memory.arguments == found.memory.outputs == 128
    assert found.memory.elsewhere == 2 * 128
    assert found.memory.needed == found.memory.peak + 2 * 128


def test_what_crosses_emulated_slices_is_told_from_what_stays_inside(mesh):
    """A sum over each axis of 128 bytes a device: between two devices each sends 128."""

    def sums(x):
        local = jax.shard_map(
            lambda x: (jax.lax.psum(x, "diloco"), jax.lax.psum(2 * x, "fsdp")),
            mesh=mesh,
            in_specs=P("diloco", "fsdp"),
            out_specs=(P(None, "fsdp"), P("diloco", None)),
            check_vma=False,
        )
        return local(x)

    x = struct(mesh, 8, 16)
    found = measured(mesh, Program("sums", sums, on_compile=lambda *_: None), [x], x)
    assert [(one.axes, one.bytes_sent) for one in found.crossings] == [(("diloco",), 128)]
    assert [(one.axes, one.bytes_sent) for one in found.inside] == [(("fsdp",), 128)]


def fake(compile_):
    return SimpleNamespace(name="inner", compile=compile_)


def test_a_program_too_big_is_in_the_result_and_another_failure_is_not_hidden(mesh):
    def failing(message):
        def compile_():
            raise jax.errors.JaxRuntimeError(message)

        return fake(compile_)

    found = measured(mesh, failing("RESOURCE_EXHAUSTED: Used 20.1G of 15.75G hbm. Exceeded"), [])
    assert "20.1G" in found.too_big and "15.75G" in found.too_big
    assert found.seconds is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        measured(mesh, failing("INTERNAL: something else"), [])


def test_a_program_that_cannot_be_read_is_named(mesh):
    """A text without a schedule; it is never reported to send nothing."""
    sizes = ("argument", "output", "temp", "alias", "generated_code")
    memory = SimpleNamespace(**{f"{name}_size_in_bytes": 0 for name in sizes})
    compiled = SimpleNamespace(as_text=lambda: "HloModule x", memory_analysis=lambda: memory)
    with pytest.raises(ConfigError, match="'inner' .*is_scheduled"):
        measured(mesh, fake(lambda: compiled), [])
