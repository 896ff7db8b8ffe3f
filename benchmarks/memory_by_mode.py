"""Compare a device's memory by mode with data parallelism's: the addition and its limit.

    PYTHONPATH=. python benchmarks/memory_by_mode.py [file.yml] [key=value ...]
        [slices=v5e-16] [fragments=9]

Compiles the programs of the steps ahead of time for two TPU slices (libtpu, no TPU); nothing is
run. "needed" is the largest memory of any of them on a device, with the rest of the run's state. A
program that two modes share is compiled once. "may add" is one fragment in float32 and 5 % of data
parallelism's memory.
"""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.exposed_time import assemble_parts, read_command_line, with_keys
from maxdiloco.command_line import guarded
from maxdiloco.engine.calls import memory_of
from maxdiloco.output import aligned
from maxdiloco.run import assemble

MIB = 2**20
PART = 0.05  # of data parallelism's memory
DEFAULTS = {"model_name": "1b", "max_target_length": "2048", "dataset_type": "synthetic"}
FOUR_BITS = {"diloco_exchange_dtype": "float4_e3m0"}
PLACES = ("device", "pinned_host")  # of the outer state
COLUMNS = ("", "outer state", "needed", "in", "adds", "one fragment", "may add")


def modes(fragments: int) -> dict[str, dict[str, Any]]:
    """Keys of each mode."""
    streaming = {
        "enable_streaming_diloco": True,
        "num_diloco_fragments": fragments,
        "num_communication_overlapping_steps": 1,
    }
    eager = {"diloco_round_overlap": "eager"}
    return {
        "DiLoCo": {},
        f"streaming P={fragments}, tau 1": streaming,
        f"streaming P={fragments}, tau 1, 4 bits": streaming | FOUR_BITS,
        "eager": eager,
        "eager, 4 bits": eager | FOUR_BITS,
    }


@guarded
def main(argv: Sequence[str]) -> int:
    options, cfg, mesh = read_command_line(argv, DEFAULTS)
    compiled: dict[str, Any] = {}
    plain, name = needed(assemble_parts(with_keys(cfg, {"enable_diloco": False}), mesh), compiled)
    where = f"{cfg.model_name}, 2 x {options['slices']}, remat_policy={cfg.remat_policy}"
    print(f"{where}: MiB a device")
    rows = [COLUMNS, ("data parallel", "", f"{plain / MIB:,.0f}", name, "", "", "")]
    print("\n".join(aligned(rows)), flush=True)
    for mode, keys in modes(int(options["fragments"])).items():
        for place in PLACES:
            parts = assemble_parts(with_keys(cfg, keys | {"diloco_outer_memory": place}), mesh)
            rows.append((mode, place, *row(parts, plain, compiled)))
            print(aligned(rows)[-1], flush=True)
    print("\n".join(["", *aligned(rows)]))
    return 0


def needed(parts: assemble.Parts, compiled: dict[str, Any]) -> tuple[int, str]:
    """The most that a program of the steps needs [bytes], and that program.

    compiled: by fingerprint, of all modes.
    """
    found = []
    for call in parts.trainer.calls(parts.batch):
        key = call.program.fingerprint(*call.args)
        if key not in compiled:
            compiled[key] = call.program.compile(*call.args)
        memory = memory_of(compiled[key], call, parts.trainer.abstract_state)
        found.append((memory.needed, call.program.name))
    return max(found)


def row(parts: assemble.Parts, plain: int, compiled: dict[str, Any]) -> tuple[str, ...]:
    """needed, its program, what it adds to data parallelism, one fragment, what it may add."""
    total, name = needed(parts, compiled)
    layout = parts.trainer.layout
    devices = parts.mesh.size // parts.mesh.shape["diloco"]
    fragment = 4 * max(plan.fragment.size for plan in layout.plans) / devices
    return (
        f"{total / MIB:,.0f}",
        name,
        f"{(total - plain) / MIB:,.0f}",
        f"{fragment / MIB:,.0f}",
        f"{(fragment + PART * plain) / MIB:,.0f}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
