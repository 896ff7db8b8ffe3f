"""The settings of the exchange between replicas: one record, shared by all packages.

The library builds the record from keyword arguments, and the training program builds it from its
configuration. The planner, the checkpoints and the islands read the same record.
"""

import dataclasses
import math
from numbers import Real
from typing import Any

import optax
from jax.sharding import Mesh

from maxdiloco.diloco import combinations, fragments, outer, outer_rate, quantize, schedule
from maxdiloco.diloco.schedule import ALL_GATHER, COLLECTIVES, REDUCE_SCATTER, Schedule
from maxdiloco.errors import CheckpointError
from maxdiloco.parallel import offload
from maxdiloco.parallel.mesh import joins_processes

AUTO = "auto"
XLA, HOST = "xla", "host"
TRANSPORTS = (XLA, HOST)
OUTER_MEMORIES = ("device", offload.HOST)
# With this many slices or more, a replica sends less by reduce-scatter than by all-gather in every
# wire format.
REDUCE_SCATTER_FROM = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """The settings of a run's exchanges: their schedule, their transport and the outer step.

    The constructor raises ValueError for values that are not allowed or cannot be combined.

    Attributes:
      num_replicas: number of replicas, M.
      sync_period: H, inner steps between two sends of a fragment.
      num_fragments: P.
      overlap_steps: tau, inner steps from a send to its apply.
      alpha: weight of the replica's own values when a fragment is applied, in [0, 1].
      round_overlap: 'none', 'delayed' or 'eager' (arXiv 2502.12996).
      outer_optimizer: one of outer.OPTIMIZERS, or any optax transformation. A fragment is a list of
        float32 arrays for it.
      outer_lr: learning rate of a named outer optimizer; None: diloco.outer_rate chooses.
      outer_momentum: momentum of a named outer optimizer; None: diloco.outer_rate chooses.
      exchange_dtype: wire format, one of quantize.NAMES.
      error_feedback: whether a replica adds the encoding error of earlier outer gradients to the
        next one; None: with int2 and topk only.
      aggregation: 'mean' or 'radial_directional_mean' of the replicas' outer gradients.
      collective: 'all_gather', 'reduce_scatter' or 'auto'.
      transport: 'xla', 'host' or 'auto'.
      sequential_layers: whether a fragment has neighbouring layers instead of every P-th layer.
      num_nonlayer_fragments: number of fragments for the leaves outside the layers.
      offsets: inner step (mod H) at which each fragment is sent; None: floor(p * H / P).
      outer_memory: 'device' or 'pinned_host': memory of the outer parameters and of the state of
        the outer optimizer.
    """

    num_replicas: int
    sync_period: int
    num_fragments: int = 1
    overlap_steps: int = 0
    alpha: float = 0.0
    round_overlap: str = "none"
    outer_optimizer: str | optax.GradientTransformation = "nesterov"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    exchange_dtype: str = "float32"
    error_feedback: bool | None = None
    aggregation: str = "mean"
    collective: str = ALL_GATHER
    transport: str = XLA
    sequential_layers: bool = False
    num_nonlayer_fragments: int = 1
    offsets: tuple[int, ...] | None = None
    outer_memory: str = "device"

    def __post_init__(self):
        """Check the values, and fill in the defaults of the named outer optimizers."""
        self._check_choices()
        self._check_counts()
        self._check_outer_optimizer()
        combinations.check(
            collective=self.collective,
            aggregation=self.aggregation,
            exchange_dtype=self.exchange_dtype,
            round_overlap=self.round_overlap,
            error_feedback=self.error_feedback,
        )

    def _check_choices(self) -> None:
        known = {
            "aggregation": outer.AGGREGATIONS,
            "collective": (*COLLECTIVES, AUTO),
            "transport": (*TRANSPORTS, AUTO),
            "outer_memory": OUTER_MEMORIES,
            "exchange_dtype": quantize.NAMES,
        }
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(values)}.")

    def _check_counts(self) -> None:
        counts = {
            "H": self.sync_period,
            "P": self.num_fragments,
            "tau": self.overlap_steps,
            "round_overlap": self.round_overlap,
        }
        schedule.check_counts(**counts)
        if self.offsets is None:
            offsets = schedule.offsets(self.num_fragments, self.sync_period)
        else:
            offsets = tuple(self.offsets)
        object.__setattr__(self, "offsets", offsets)
        schedule.check(offsets=offsets, **counts)
        if not schedule.is_count(self.num_replicas) or self.num_replicas < 1:
            raise ValueError(
                f"num_replicas={self.num_replicas} must be a positive integer. Use 1 or more."
            )
        if not schedule.is_count(self.num_nonlayer_fragments) or self.num_nonlayer_fragments < 1:
            raise ValueError(
                f"num_nonlayer_fragments={self.num_nonlayer_fragments} must be a positive integer: "
                "it counts the fragments of leaves that belong to no layer. Use 1 or more."
            )
        if not (isinstance(self.alpha, Real) and 0.0 <= self.alpha <= 1.0):
            raise ValueError(
                f"alpha={self.alpha!r} must be in [0, 1]: it is the weight of a replica's own "
                "values. Use 0 to take the outer parameters."
            )

    def _check_outer_optimizer(self) -> None:
        lr, momentum = self.outer_lr, self.outer_momentum
        if not isinstance(self.outer_optimizer, str):
            if (lr, momentum) != (None, None):
                raise ValueError(
                    f"outer_lr={lr} and outer_momentum={momentum} do nothing when outer_optimizer "
                    "is an optax transformation, which has its own. Leave them out."
                )
            return
        if self.outer_optimizer not in outer.OPTIMIZERS:
            raise ValueError(
                f"outer_optimizer={self.outer_optimizer!r} is unknown. Use one of "
                f"{', '.join(outer.OPTIMIZERS)}, or an optax transformation."
            )
        if lr is None:
            lr = outer_rate.rate(
                self.num_replicas,
                round_overlap=self.round_overlap,
                aggregation=self.aggregation,
            )
        if momentum is None:
            momentum = outer_rate.momentum(self.outer_optimizer)
        if not (isinstance(lr, Real) and 0 <= lr < math.inf):
            raise ValueError(
                f"outer_lr={lr!r} must be a number >= 0: with a negative one the outer parameters "
                "move away from the replicas. Leave it out for the default."
            )
        if not (isinstance(momentum, Real) and 0 <= momentum < 1):
            raise ValueError(
                f"outer_momentum={momentum!r} must be in [0, 1): otherwise the sum of the outer "
                "gradients grows without limit. Leave it out for the default."
            )
        object.__setattr__(self, "outer_lr", lr)
        object.__setattr__(self, "outer_momentum", momentum)

    # -- values derived from the settings --------------------------------------------------------

    @property
    def wire(self) -> quantize.WireFormat:
        """The wire format of outer gradients."""
        return quantize.wire_format(self.exchange_dtype)

    @property
    def feeds_back(self) -> bool:
        """Whether replicas keep error-feedback residuals."""
        return self.wire.feedback if self.error_feedback is None else self.error_feedback

    @property
    def is_eager(self) -> bool:
        """Whether every replica has its own outer parameters."""
        return self.round_overlap == "eager"

    @property
    def no_reduce_scatter(self) -> str:
        """The setting that excludes reduce-scatter, with the reason; empty if none does."""
        return combinations.no_reduce_scatter(
            aggregation=self.aggregation,
            exchange_dtype=self.exchange_dtype,
            round_overlap=self.round_overlap,
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule without the number of chunks of each fragment; Layout.schedule has it."""
        return Schedule(
            self.sync_period,
            self.overlap_steps,
            self.offsets,
            self.round_overlap,
            in_programs=self.transport in (XLA, AUTO),
            collective=self.collective,
        )

    def partition(self, params: Any, layer_axis: Any) -> tuple[fragments.Fragment, ...]:
        """Cut one replica's parameters into fragments. Raises ValueError as fragments.partition."""
        return fragments.partition(
            params,
            layer_axis,
            num_fragments=self.num_fragments,
            num_nonlayer=self.num_nonlayer_fragments,
            sequential=self.sequential_layers,
        )

    def make_outer_optimizer(self) -> optax.GradientTransformation:
        """Return the outer optimizer."""
        if not isinstance(self.outer_optimizer, str):
            return self.outer_optimizer
        return outer.OPTIMIZERS[self.outer_optimizer](self.outer_lr, self.outer_momentum)

    def resolve(
        self, *, num_slices: int, platform: str = "cpu", joins_processes: bool = False
    ) -> "ExchangeSettings":
        """Replace every 'auto' by a value, and check M against the mesh.

        Reduce-scatter needs one step for the parts and another one for the means, and saves bytes
        with REDUCE_SCATTER_FROM slices or more. XLA hides an exchange behind computation on TPU
        only; on other devices exchanges between processes go through host memory.

        Args:
          num_slices: size of the mesh axis `diloco`.
          platform: platform of the devices: cpu, gpu or tpu.
          joins_processes: whether slices are in different processes.

        Raises:
          ValueError: M is not a multiple of num_slices.
        """
        schedule.check_replicas(
            self.num_replicas,
            num_slices,
            name="num_replicas",
            axis_size_name="the mesh's diloco size",
        )
        collective, transport = self.collective, self.transport
        if collective == AUTO:
            pays = num_slices >= REDUCE_SCATTER_FROM and self.schedule.max_chunks != 1
            collective = REDUCE_SCATTER if pays and not self.no_reduce_scatter else ALL_GATHER
        if transport == AUTO:
            transport = HOST if platform != "tpu" and joins_processes else XLA
        return dataclasses.replace(self, collective=collective, transport=transport)

    def resolve_on(self, mesh: Mesh) -> "ExchangeSettings":
        """Resolve for the devices of a mesh."""
        return self.resolve(
            num_slices=mesh.shape["diloco"],
            platform=mesh.devices.flat[0].platform,
            joins_processes=joins_processes(mesh),
        )

    # -- in a checkpoint -------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values. An optax transformation becomes 'custom'."""
        fields = vars(self) | {"offsets": list(self.offsets), "error_feedback": self.feeds_back}
        is_named = isinstance(self.outer_optimizer, str)
        return fields | {
            "alpha": float(self.alpha),
            "outer_optimizer": self.outer_optimizer if is_named else "custom",
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "ExchangeSettings":
        """Return the settings of `to_json`.

        Raises:
          CheckpointError: a field is unknown or missing.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if later := fields.keys() - known:
            raise CheckpointError(
                f"exchange of the checkpoint has {', '.join(sorted(later))}, which this version of "
                "maxdiloco does not know. Use the version that wrote it."
            )
        if missing := known - fields.keys():
            raise CheckpointError(
                f"exchange of the checkpoint has no {', '.join(sorted(missing))}. "
                "Use the checkpoint of a DiLoCo run."
            )
        if fields["outer_optimizer"] == "custom":
            fields = fields | {"outer_optimizer": optax.identity()}
        try:
            return cls(**fields | {"offsets": tuple(fields["offsets"])})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"exchange of the checkpoint: {error}") from error
