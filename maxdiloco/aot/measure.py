"""Every program of a run, compiled for devices that need not be there, and what the result says."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from maxdiloco.aot.hlo import collectives, flops, reader, replay, transfers
from maxdiloco.aot.hlo.collectives import Collective
from maxdiloco.aot.hlo.replay import Link, Timing
from maxdiloco.aot.hlo.transfers import Transfer
from maxdiloco.engine.calls import START, Call
from maxdiloco.engine.describe import bytes_on_device
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.compiles import too_big

PALLAS = "tpu_custom_call"


class Memory(NamedTuple):
    """Bytes on one device. peak: of the program alone; elsewhere: the rest of the run's state."""

    arguments: int
    outputs: int
    temporary: int
    peak: int
    elsewhere: int

    @property
    def needed(self) -> int:
        """What has to fit the chip while the program runs."""
        return self.peak + self.elsewhere


class Crossing(NamedTuple):
    """A collective that reaches other slices. timing: None where there is no schedule of a TPU."""

    kind: str
    dtype: str
    axes: tuple[str, ...]
    bytes_per_device: int
    padding: int
    times: int
    in_conditional: bool
    timing: Timing | None


class Measured(NamedTuple):
    """One program. too_big: what the compiler said when it does not fit, and nothing else is known.

    seconds: device time of one run with nothing to wait for from other slices, by the compiler's
    estimates; None off TPU. kernels: Pallas kernels, which carry no estimate and are not in it.
    runs: in the H steps of a period. when: see Call.
    """

    name: str
    runs: float
    when: str
    compile_seconds: float
    too_big: str
    flops: float
    seconds: float | None
    kernels: int
    memory: Memory
    crossings: tuple[Crossing, ...]
    inside: tuple[Collective, ...]

    @property
    def busy(self) -> float:
        """Seconds that the link between slices is busy in one run."""
        return sum(one.timing.busy for one in self.crossings if one.timing)

    @property
    def exposed(self) -> float:
        """Seconds that a device stands still for other slices in one run."""
        return sum(one.timing.waited for one in self.crossings if one.timing)


class Tiers(NamedTuple):
    """Mesh axes over slices and inside a slice, with their sizes, in mesh order."""

    dcn: Mapping[str, int]
    ici: Mapping[str, int]


def tiers(mesh: Mesh, dcn: Mapping[str, int]) -> Tiers:
    """dcn: sizes of the axes over slices, none left open."""
    ici = {axis: size // dcn[axis] for axis, size in mesh.shape.items()}
    return Tiers(dict(dcn), ici)


def measure(
    calls: list[Call],
    state: Any,
    *,
    mesh_tiers: Tiers,
    link: Link | None,
    say: Callable[[str], None],
) -> list[Measured]:
    """Compile every call and read what came out.

    state: all that the run keeps on the devices, as ShapeDtypeStructs. link: None off TPU, where
    programs have no schedule of transfers. A program that does not fit the chip is in the result.
    Raises ConfigError for a construct that the reader of the programs does not know.
    """
    out = []
    for call in calls:
        start = time.perf_counter()
        try:
            compiled = call.program.compile(*call.args)
        except jax.errors.JaxRuntimeError as error:
            if (reason := too_big(error)) is None:
                raise
            out.append(_too_big(call, time.perf_counter() - start, reason))
            say(f"{call.program.name} does not fit: {out[-1].too_big}")
            continue
        seconds = time.perf_counter() - start
        memory = _memory(compiled.memory_analysis(), call, state)
        read = _on_tpu if link is not None else _elsewhere
        try:
            module = reader.read(compiled.as_text())
            out.append(read(call, seconds, module, memory, mesh_tiers, link))
        except ValueError as error:
            raise ConfigError(
                f"the compiled program {call.program.name!r} has something that the report cannot "
                f"read, so nothing is said of what it sends: {error}"
            ) from error
    return out


def _too_big(call: Call, seconds: float, reason: str) -> Measured:
    nothing = Memory(0, 0, 0, 0, 0)
    return Measured(
        call.program.name, call.runs, call.when, seconds, reason, 0.0, None, 0, nothing, (), ()
    )


def _memory(analysis: Any, call: Call, state: Any) -> Memory:
    arguments, outputs = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    temporary, shared = analysis.temp_size_in_bytes, analysis.alias_size_in_bytes
    peak = arguments + outputs - shared + temporary + analysis.generated_code_size_in_bytes
    # A program of the start makes the state: there is none besides.
    kept = [x for x in jax.tree.leaves(state) if _on_device(x) and call.when != START]
    names = {id(x) for x in kept}
    passed = [x for x in jax.tree.leaves(call.args) if id(x) in names]
    elsewhere = sum(map(bytes_on_device, kept)) - sum(map(bytes_on_device, passed))
    return Memory(arguments, outputs, temporary, peak, elsewhere)


def _on_device(x: Any) -> bool:
    is_array = isinstance(x, jax.ShapeDtypeStruct)
    return is_array and x.sharding.memory_kind in (None, "device")


def _on_tpu(call, seconds, module, memory, mesh_tiers, link) -> Measured:
    played = replay.replay(module, link)
    times = transfers.runs(module)
    crossings = [
        _crossing(one, times[one.rendezvous], played.transfers[one.rendezvous], mesh_tiers.dcn)
        for one in transfers.transfers(module)
    ]
    kernels = [
        item
        for _, item in module.reached()
        if item.opcode == "custom-call" and item.attribute("custom_call_target") == PALLAS
    ]
    return _measured(call, seconds, module, memory)._replace(
        seconds=played.seconds - played.waited,
        kernels=len(kernels),
        crossings=tuple(crossings),
        inside=tuple(collectives.collectives(module, mesh_tiers.ici)),
    )


def _measured(call, seconds, module, memory) -> Measured:
    """What needs no link: everything but times and traffic."""
    return Measured(
        name=call.program.name,
        runs=call.runs,
        when=call.when,
        compile_seconds=seconds,
        too_big="",
        flops=flops.matmul_flops(module),
        seconds=None,
        kernels=0,
        memory=memory,
        crossings=(),
        inside=(),
    )


def _crossing(transfer: Transfer, times: int, timing: Timing, dcn: Mapping[str, int]) -> Crossing:
    return Crossing(
        kind=transfer.kind.lower().replace("_", "-"),
        dtype=transfer.sent.dtype,
        axes=collectives.axes_of(transfer.slices, dcn),
        bytes_per_device=transfer.bytes_sent(),
        padding=transfer.padding,
        times=times,
        in_conditional=transfer.in_conditional,
        timing=timing,
    )


def _elsewhere(call, seconds, module, memory, mesh_tiers, link) -> Measured:
    """CPU and GPU number all devices in one program; slices are blocks of them."""
    whole = {axis: n * mesh_tiers.ici[axis] for axis, n in mesh_tiers.dcn.items()}
    found = collectives.collectives(module, whole)
    over = {axis for axis, size in mesh_tiers.dcn.items() if size > 1}
    crossing = [one for one in found if over & set(one.axes)]
    return _measured(call, seconds, module, memory)._replace(
        crossings=tuple(
            Crossing(one.kind, one.dtype, one.axes, one.bytes_sent, 0, one.times, False, None)
            for one in crossing
        ),
        inside=tuple(one for one in found if one not in crossing),
    )
