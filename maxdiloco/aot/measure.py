"""Compiles every program of a run for devices that need not be there, and reads the results."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from maxdiloco.aot.hlo import collectives, flops, kernels, reader, replay, transfers
from maxdiloco.aot.hlo.collectives import Collective
from maxdiloco.aot.hlo.replay import Link, Timing
from maxdiloco.aot.hlo.transfers import Transfer
from maxdiloco.engine.calls import Call, Memory, bytes_on_device, elsewhere, is_on_device, memory_of
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.compiles import temporaries, too_big


class Crossing(NamedTuple):
    """A collective that reaches other slices.

    timing: where a send-done waits for the whole transfer; None off TPU. waited_least: seconds
    that the device waits where it waits for nothing; see hlo/replay.py.
    """

    kind: str
    dtype: str
    axes: tuple[str, ...]
    bytes_per_device: int
    padding: int
    times: int
    in_conditional: bool
    timing: Timing | None
    waited_least: float = 0.0


class Measured(NamedTuple):
    """One compiled program.

    runs: in the H steps of a period. when, event: see Call. too_big: the compiler's message when
    the program does not fit the chip; all that is known then is the memory of its arguments and of
    the state, and that of the temporaries where the message has it. seconds: device time of one run
    without waits for other slices, as the compiler estimates it; None off TPU. kernels: number of
    Pallas kernels that have no estimate and add nothing to `seconds`.
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
    event: str = ""

    @property
    def busy(self) -> float:
        """Seconds that the link between slices is busy in one run."""
        return sum(crossing.timing.busy for crossing in self.crossings if crossing.timing)

    @property
    def exposed(self) -> float:
        """Seconds that a device waits for other slices in one run, at most."""
        return sum(crossing.timing.waited for crossing in self.crossings if crossing.timing)

    @property
    def exposed_least(self) -> float:
        """The same where a send-done waits for nothing."""
        return sum(crossing.waited_least for crossing in self.crossings)


class Tiers(NamedTuple):
    """Sizes of the mesh axes over slices (dcn) and inside a slice (ici), in mesh order."""

    dcn: Mapping[str, int]
    ici: Mapping[str, int]


def tiers(mesh: Mesh, dcn: Mapping[str, int]) -> Tiers:
    """The Tiers of a mesh. dcn: sizes of the axes over slices, without a -1."""
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
    """Compile the program of every call and read its HLO.

    state: what the run keeps on the devices, as ShapeDtypeStructs. link: None off TPU, where
    programs have no schedule of transfers. A program that does not fit the chip is in the result.
    Raises ConfigError for a construct that the HLO reader does not know.
    """
    out = []
    for call in calls:
        start = time.perf_counter()
        try:
            compiled = call.program.compile(*call.args)
        except jax.errors.JaxRuntimeError as error:
            if (reason := too_big(error)) is None:
                raise
            out.append(_too_big(call, time.perf_counter() - start, reason, state))
            say(f"{call.program.name} does not fit: {out[-1].too_big}")
            continue
        seconds = time.perf_counter() - start
        memory = memory_of(compiled, call, state)
        read = _on_tpu if link is not None else _off_tpu
        try:
            module = reader.read(compiled.as_text())
            out.append(read(call, seconds, module, memory, mesh_tiers, link))
        except ValueError as error:
            raise ConfigError(
                f"the compiled program {call.program.name!r} has something that the report cannot "
                f"read, so what it sends is unknown: {error}"
            ) from error
    return out


def _too_big(call: Call, seconds: float, reason: str, state: Any) -> Measured:
    arguments = sum(bytes_on_device(x) for x in jax.tree.leaves(call.args) if is_on_device(x))
    temporary = temporaries(reason, arguments)
    memory = Memory(arguments, 0, temporary, arguments + temporary, elsewhere(call, state))
    return Measured(
        call.program.name, call.runs, call.when, seconds, reason, 0.0, None, 0, memory, (), (),
        call.event,
    )  # fmt: skip


def _on_tpu(call, seconds, module, memory, mesh_tiers, link) -> Measured:
    played = replay.replay(module, link)
    least = replay.replay(module, link._replace(send_done_waits=False)).transfers
    times = transfers.runs(module)
    crossings = [
        _crossing(t, times[t.rendezvous], played.transfers[t.rendezvous], mesh_tiers.dcn)._replace(
            waited_least=least[t.rendezvous].waited
        )
        for t in transfers.transfers(module)
    ]
    unknown = [
        item
        for where, item in module.reached()
        if kernels.is_kernel(item) and kernels.flops(where, item) is None
    ]
    return _measured(call, seconds, module, memory)._replace(
        seconds=played.seconds - played.waited,
        kernels=len(unknown),
        crossings=tuple(crossings),
        inside=tuple(collectives.collectives(module, mesh_tiers.ici)),
    )


def _measured(call, seconds, module, memory) -> Measured:
    """A program without its times and traffic, which need the link."""
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
        event=call.event,
    )


def _crossing(transfer: Transfer, times: int, timing: Timing, dcn: Mapping[str, int]) -> Crossing:
    return Crossing(
        kind=transfer.collective,
        dtype=transfer.sent.dtype,
        axes=collectives.axes_of(transfer.slices, dcn),
        bytes_per_device=transfer.bytes_sent(),
        padding=transfer.padding,
        times=times,
        in_conditional=transfer.in_conditional,
        timing=timing,
    )


def _off_tpu(call, seconds, module, memory, mesh_tiers, link) -> Measured:
    """CPU and GPU number all devices in one program; slices are blocks of them."""
    sizes = {axis: n * mesh_tiers.ici[axis] for axis, n in mesh_tiers.dcn.items()}
    dcn_axes = {axis for axis, size in mesh_tiers.dcn.items() if size > 1}
    items = collectives.collectives(module, sizes)
    return _measured(call, seconds, module, memory)._replace(
        crossings=tuple(
            Crossing(item.kind, item.dtype, item.axes, item.bytes_sent, 0, item.times, False, None)
            for item in items
            if dcn_axes & set(item.axes)
        ),
        inside=tuple(item for item in items if not dcn_axes & set(item.axes)),
    )
