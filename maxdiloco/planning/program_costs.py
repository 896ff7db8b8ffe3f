"""Compile every program of a run, for devices that may be absent, and measure the results."""

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from maxdiloco.engine.calls import Call, Memory, bytes_on_device, elsewhere, is_on_device, memory_of
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.out_of_memory import out_of_memory_message, temporary_bytes
from maxdiloco.parallel.chips import Chip
from maxdiloco.planning.hlo import kernels, reader, replay, traffic


class ProgramCost(NamedTuple):
    """One compiled program.

    Attributes:
      name: name of the program.
      runs: number of runs in the H steps of a period.
      when: see Call.
      event: see Call.
      compile_seconds: time of its compile.
      memory: on a device. If the program does not fit, it has the arguments and the rest of the
        state. It has the temporaries only if the compiler's message has them.
      too_big: the compiler's message if the program does not fit the chip.
      flops: FLOPs of one run on a device.
      seconds: device time of one run without waits for other slices, as the compiler estimates it;
        None off TPU.
      unknown_calls: number of runs of each custom call that adds nothing to `seconds`, see
        hlo/kernels.py.
      crossings: collectives between slices.
      inside: collectives inside a slice.
    """

    name: str
    runs: float
    when: str
    event: str
    compile_seconds: float
    memory: Memory
    too_big: str = ""
    flops: float = 0.0
    seconds: float | None = None
    unknown_calls: Mapping[str, int] = MappingProxyType({})
    crossings: tuple[traffic.Collective, ...] = ()
    inside: tuple[traffic.Collective, ...] = ()

    @property
    def busy(self) -> float:
        """Seconds that the link between slices is busy in one run."""
        return sum(crossing.timing.busy for crossing in self.crossings if crossing.timing)

    @property
    def exposed(self) -> float:
        """Upper bound on the seconds that a device waits for other slices in one run."""
        return sum(crossing.timing.waited for crossing in self.crossings if crossing.timing)


def measure(
    calls: Iterable[Call],
    state: Any,
    *,
    mesh: Mesh,
    dcn: Mapping[str, int],
    chip: Chip | None,
    gbps: float,
    say: Callable[[str], None],
) -> list[ProgramCost]:
    """Compile the program of every call and read its HLO.

    Args:
      calls: programs of the run.
      state: the run's arrays on the devices, as ShapeDtypeStructs.
      mesh: mesh of the run.
      dcn: sizes of the mesh axes over slices.
      chip: type of a device. None and chips without estimated times have no schedule of transfers.
      gbps: a device's share of the link [Gbit/s].
      say: prints a line.

    Returns:
      The programs, including programs that do not fit.

    Raises:
      ConfigError: the HLO reader cannot read a program.
    """
    out = []
    for call in calls:
        name, start = call.program.name, time.perf_counter()
        try:
            compiled = call.program.compile(*call.args)
        except jax.errors.JaxRuntimeError as error:
            if (reason := out_of_memory_message(error)) is None:
                raise
            say(f"{name} does not fit: {reason}")
            taken = (x for x in jax.tree.leaves(call.args) if is_on_device(x))
            arguments = sum(map(bytes_on_device, taken))
            temporary = temporary_bytes(reason, arguments)
            peak, other = arguments + temporary, elsewhere(call, state)
            compiled, memory = None, Memory(arguments, 0, temporary, peak, other)
        else:
            reason, memory = "", memory_of(compiled, call, state)
        seconds = time.perf_counter() - start
        found = ProgramCost(name, call.runs, call.when, call.event, seconds, memory, reason)
        out.append(found)
        if compiled is None:
            continue
        try:
            module = reader.read(compiled.as_text())
            timed = chip is not None and chip.timed
            read = _on_tpu(module, mesh, dcn, chip, gbps) if timed else _off_tpu(module, mesh, dcn)
            out[-1] = found._replace(flops=kernels.matmul_flops(module), **read)
        except ValueError as error:
            raise ConfigError(
                f"the compiled program {name!r} cannot be read by the report, so its traffic is "
                f"unknown: {error}"
            ) from error
    return out


def _on_tpu(
    module: reader.Module, mesh: Mesh, dcn: Mapping[str, int], chip: Chip, gbps: float
) -> dict[str, Any]:
    """Return the fields of ProgramCost for TPUs. A program numbers the devices of one slice."""
    played = replay.replay(module, chip, gbps)
    least = replay.replay(module, chip, gbps, send_done_waits=False).transfers
    crossings = [
        t._replace(timing=timing, waited_least=least[t.rendezvous].waited)
        for t in traffic.transfers(module, dcn)
        for timing in [played.transfers[t.rendezvous]]
    ]
    ici = {axis: size // dcn[axis] for axis, size in mesh.shape.items()}
    return {
        "seconds": played.clock.now - played.waited,
        "unknown_calls": kernels.unknown_calls(module),
        "crossings": tuple(crossings),
        "inside": tuple(traffic.collectives(module, ici)),
    }


def _off_tpu(module: reader.Module, mesh: Mesh, dcn: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of ProgramCost for CPU and GPU.

    There one program numbers all devices. Each slice is a contiguous block of them.
    """
    over_slices = {axis for axis, size in dcn.items() if size > 1}
    found = traffic.collectives(module, dict(mesh.shape))
    crossings = tuple(item for item in found if over_slices & set(item.axes))
    return {"crossings": crossings, "inside": tuple(x for x in found if x not in crossings)}
