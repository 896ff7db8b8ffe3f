"""Exposed time on the link between slices: every mode, data parallelism and the peers' way.

    python benchmarks/exposed_time.py [file.yml] [key=value ...] [slices=v5e-16] [fragments=9]

Compiles ahead of time for two TPU slices (libtpu, no TPU) and replays the compiled schedules at
each of GBPS; nothing is run. A figure is the time that a device waits for the other slice in one
period of H inner steps [ms]: data parallelism exchanges H times, the others once for each fragment.

The peers' way is one program with the exchange in lax.cond behind the inner step, in float32, with
the mean over replicas in array code. Only this file has it.

    # R replicas
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxdiloco.command_line import guarded
from maxdiloco.config import config
from maxdiloco.config.keys import Config
from maxdiloco.diloco import outer, slices
from maxdiloco.output import aligned
from maxdiloco.parallel import chips
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.replicas import map_fn
from maxdiloco.planning import topology
from maxdiloco.planning.hlo import reader, replay
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

GBPS = (25.0, 2.0, 0.5)  # of one device
DEFAULTS = {"model_name": "peer25m", "max_target_length": "512", "dataset_type": "synthetic"}
STREAMING = {"enable_streaming_diloco": True}
EXCHANGES = ("inner + exchange", "synchronise")  # how names of programs that exchange begin


def modes(fragments: int) -> dict[str, dict[str, Any]]:
    """Keys of each mode."""
    many = STREAMING | {"num_diloco_fragments": fragments}
    one_step = {"num_communication_overlapping_steps": 1}
    five = {"num_communication_overlapping_steps": 5}
    four_bits = {"diloco_exchange_dtype": "float4_e3m0"}
    return {
        "DiLoCo, tau 0, float32": {},
        "DiLoCo, tau 0, float4_e3m0": four_bits,
        f"streaming P={fragments}, tau 0, float32": many,
        f"streaming P={fragments}, tau 1, float32": many | one_step,
        f"streaming P={fragments}, tau 1, float4_e3m0": many | one_step | four_bits,
        f"streaming P={fragments}, tau 5, float32": many | five,
        f"streaming P={fragments}, tau 5, float4_e3m0": many | five | four_bits,
        "eager, float32": {"diloco_round_overlap": "eager"},
        "eager, float4_e3m0": {"diloco_round_overlap": "eager"} | four_bits,
    }


def read_command_line(
    argv: Sequence[str], defaults: Mapping[str, str]
) -> tuple[dict[str, str], Config, jax.sharding.Mesh]:
    """slices and fragments of a command line, the config of its other keys, and the mesh of two
    absent slices. Raises ConfigError.
    """
    options = {"slices": "v5e-16", "fragments": "9"}
    options |= dict(arg.split("=", 1) for arg in argv if arg.partition("=")[0] in options)
    flags = [arg for arg in argv if arg.partition("=")[0] not in options]
    given = {flag.partition("=")[0] for flag in flags}
    flags += [f"{key}={value}" for key, value in defaults.items() if key not in given]
    cfg = config.load(flags, os.environ)
    jax.config.update("jax_platforms", "cpu")
    mesh_lib.configure_libtpu(run_settings.read_mesh(cfg))
    mesh = mesh_lib.build(run_settings.read_mesh(cfg), topology.devices(options["slices"], 2))
    return options, cfg, mesh


@guarded
def main(argv: Sequence[str]) -> int:
    options, cfg, mesh = read_command_line(argv, DEFAULTS)
    chip = topology.find(options["slices"]).chip
    fragments = int(options["fragments"])
    where = f"{cfg.model_name}, 2 x {options['slices']}"
    print(f"{where}, H={cfg.diloco_sync_period}: exposed ms a period")
    rows = [("", "MiB/device", "link ms at 25", *(f"exposed at {gbps:g}" for gbps in GBPS))]

    def row(name: str, counted: list[tuple[Any, int]]) -> None:
        rows.append((name, *figures(counted, chip)))
        print(aligned(rows)[-1], flush=True)

    plain = with_keys(cfg, {"enable_diloco": False})
    row("data parallel", exchanges(plain, mesh, runs=cfg.diloco_sync_period))
    for name, keys in modes(fragments).items():
        row(name, exchanges(with_keys(cfg, keys), mesh))
    row("the peers' way, P=1", peers(cfg, mesh, 1))
    row(f"the peers' way, P={fragments}", peers(cfg, mesh, fragments))
    print("\n".join(["", *aligned(rows)]))
    return 0


def with_keys(cfg: config.Config, keys: dict[str, Any]) -> config.Config:
    return config.from_dict(cfg.as_dict() | keys)


def assemble_parts(cfg: config.Config, mesh: Any) -> assemble.Parts:
    return assemble.assemble(
        run_settings.read(cfg, mesh), mesh, total_steps=cfg.steps, on_compile=_say
    )


def _say(name: str, seconds: float, compiled: jax.stages.Compiled) -> None:
    print(f"  compiled {name} in {seconds:.1f} s", flush=True)


def exchanges(cfg: config.Config, mesh: Any, *, runs: int = 0) -> list[tuple[Any, int]]:
    """The programs of a mode that exchange, with their runs in a period. runs: counts every one."""
    parts = assemble_parts(cfg, mesh)
    calls = parts.trainer.calls(parts.batch)
    found = [call for call in calls if call.program.name.startswith(EXCHANGES) or runs]
    return [(_read(call.program.compile(*call.args)), runs or call.runs) for call in found]


def _read(compiled: jax.stages.Compiled) -> Any:
    return reader.read(compiled.as_text())


def figures(counted: list[tuple[Any, int]], chip: chips.Chip) -> tuple[str, ...]:
    """MiB of a period, ms on the link at the first of GBPS, exposed ms at each."""
    played = [
        [(replay.replay(module, chip, gbps), runs) for module, runs in counted]
        for gbps in GBPS
    ]  # fmt: skip
    busy = sum(runs * replayed.busy for replayed, runs in played[0])
    waited = [sum(runs * replayed.waited for replayed, runs in at) for at in played]
    mib = busy * GBPS[0] * 1e9 / 8 / 2**20
    return (f"{mib:,.1f}", f"{1e3 * busy:,.1f}", *(f"{1e3 * seconds:,.1f}" for seconds in waited))


def peers(cfg: config.Config, mesh: Any, fragments: int) -> list[tuple[Any, int]]:
    """One program for fragments with equal cuts, with their number."""
    keys = STREAMING | {"num_diloco_fragments": fragments} if fragments > 1 else {}
    cfg = with_keys(cfg, keys)
    parts = assemble_parts(cfg, mesh)
    by_form: dict[tuple, list] = {}
    for plan in parts.trainer.layout.plans:
        by_form.setdefault(plan.form, []).append(plan)
    return [(_read(peers_program(cfg, parts, alike[0])), len(alike)) for alike in by_form.values()]


def peers_program(cfg: config.Config, parts: assemble.Parts, plan: Any) -> jax.stages.Compiled:
    """The inner step, then a fragment's exchange and outer step in a conditional."""
    layout = parts.trainer.layout
    state, rule = layout.state, layout.settings.make_outer_optimizer()
    step = map_fn(inner_step(cfg, parts), mesh=layout.mesh)

    def program(params, opt_state, batch, theta, outer_opt, send):
        params, opt_state, metrics = step(params, opt_state, batch)
        before = (jax.tree.leaves(params), jax.tree.leaves(theta), outer_opt)
        sync = functools.partial(synchronised, plan, rule)
        leaves, theta_leaves, outer_opt = jax.lax.cond(send, sync, lambda *x: x, *before)
        params = jax.tree.unflatten(jax.tree.structure(params), leaves)
        theta = jax.tree.unflatten(jax.tree.structure(theta), theta_leaves)
        return params, opt_state, theta, outer_opt, metrics

    args = (
        state.params,
        state.opt_state,
        parts.batch,
        state.outer,
        state.outer_opt[plan.index],
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    shardings = jax.tree.map(lambda x: x.sharding, args[:2] + args[3:5])
    jitted = jax.jit(program, donate_argnums=(0, 1, 3, 4), out_shardings=(*shardings, None))
    return jitted.lower(*args).compile()


def synchronised(plan: Any, rule: Any, leaves: list, theta: list, outer_opt: Any) -> tuple:
    """Average the outer gradients, take the outer step, and copy the result to all replicas."""
    leaves, theta = list(leaves), list(theta)
    starts = list(zip(plan.slices, plan.starts, strict=True))
    x_R = [slices.gather_slice(leaves[s.leaf], s, start, num_leading=1) for s, start in starts]
    old = [slices.gather_slice(theta[s.leaf], s, start) for s, start in starts]
    mean = [jnp.mean(o[None] - x, axis=0) for o, x in zip(old, x_R, strict=True)]
    new, outer_opt = outer.outer_update(rule, old, outer_opt, mean)
    for (s, start), value, x in zip(starts, new, x_R, strict=True):
        theta[s.leaf] = slices.scatter_slice(theta[s.leaf], s, start, value)
        spread = jnp.broadcast_to(value, x.shape)
        leaves[s.leaf] = slices.scatter_slice(leaves[s.leaf], s, start, spread, num_leading=1)
    return leaves, theta, outer_opt


def inner_step(cfg: config.Config, parts: assemble.Parts) -> Callable:
    from maxdiloco.run import inner_step as ours
    from maxdiloco.run import optimizer

    return ours.make(
        parts.model,
        optimizer.build(run_settings.read_optimizer(cfg), model=parts.model),
        accumulation=cfg.gradient_accumulation_steps,
        nan_policy=cfg.nan_policy,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
