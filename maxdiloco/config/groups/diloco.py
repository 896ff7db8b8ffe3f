"""Keys of DiLoCo: replicas, fragments, the exchange of outer gradients, and islands."""

import re
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from maxdiloco.config import checks
from maxdiloco.config.fields import (
    DROPS,
    FREE,
    Group,
    key,
    require_default,
    rule,
)
from maxdiloco.config.values import (
    INTEGER,
    Auto,
    Bool,
    Count,
    Natural,
    NonNegative,
    Positive,
    Share,
    ShareBelowOne,
)
from maxdiloco.diloco import combinations, schedule
from maxdiloco.errors import ConfigError

# What the messages of the shared checks call their settings.
_SCHEDULE = schedule.Names(
    H="diloco_sync_period",
    P="num_diloco_fragments",
    tau="num_communication_overlapping_steps",
    round_overlap="diloco_round_overlap",
)
_COMBINATIONS = combinations.Names(
    collective="diloco_collective",
    aggregation="diloco_aggregation",
    exchange_dtype="diloco_exchange_dtype",
    round_overlap="diloco_round_overlap",
    error_feedback="diloco_error_feedback=always",
)


class Diloco(Group):
    """Replicas and the outer optimizer."""

    group: ClassVar[str] = "diloco"
    title: ClassVar[str] = "replicas, outer optimizer and exchange (docs/concepts)"

    enable_diloco: Bool = key(True, start_here=True)
    """Train replicas that exchange outer gradients. false: data parallelism on the same mesh."""
    num_diloco_replicas: Count | Auto = key("auto", unit="replicas", resume=FREE)
    """Number of replicas, a multiple of dcn * ici diloco parallelism. auto: that product."""
    # arXiv 2501.18512 on Dolma; 30 in its other runs.
    diloco_sync_period: Count = key(100, unit="inner steps", resume=DROPS, start_here=True)
    """Inner steps between two exchanges of a fragment (H)."""
    # The rule is diloco/outer_rate.py; its evidence docs/reference/results.md.
    diloco_outer_lr: NonNegative | Auto = key("auto", resume=FREE)
    """Learning rate of the outer optimizer. auto: 0.4 to 1, by mode and number of replicas."""
    diloco_outer_momentum: ShareBelowOne | Auto = key("auto")
    """Momentum of the outer optimizer, b1 of adam. auto: 0.6, and 0.9 with adam."""
    # arXiv 2311.08105 section 3.
    diloco_outer_optimizer: Literal["nesterov", "sgd", "adam"] = key("nesterov")
    """Outer optimizer: SGD with Nesterov momentum, SGD with momentum, or Adam."""
    diloco_outer_memory: Literal["device", "pinned_host"] = key("device", resume=FREE)
    """Memory of the outer parameters and of the state of the outer optimizer."""

    @rule
    def _check_replicas(self: Any) -> None:
        if not self.enable_diloco:
            require_default(
                self,
                "num_diloco_replicas enable_streaming_diloco num_communication_overlapping_steps "
                "communication_overlapping_alpha diloco_round_overlap diloco_exchange_dtype "
                "diloco_error_feedback diloco_aggregation diloco_collective diloco_outer_memory "
                "diloco_transport",
                "enable_diloco=false",
                "enable_diloco=true",
            )
        dcn, ici = self.dcn_diloco_parallelism, self.ici_diloco_parallelism
        if dcn * ici > 0 and self.num_diloco_replicas != "auto":
            checks.check_replicas(
                self.num_diloco_replicas, dcn * ici, f"dcn diloco {dcn} * ici diloco {ici} ="
            )


class DilocoFragments(Group):
    """Fragments and overlap."""

    group: ClassVar[str] = "diloco"
    heading: ClassVar[str] = "fragments and overlap (Streaming DiLoCo, arXiv 2501.18512)"

    enable_streaming_diloco: Bool = key(False, resume=DROPS, start_here=True)
    """Exchange the parameters in num_diloco_fragments parts, one after the other in a period."""
    num_diloco_fragments: Count = key(1, unit="fragments", resume=DROPS, start_here=True)
    """Number of fragments (P). The paper has three layers in each, and one for the embedding."""
    # arXiv 2501.18512, figure 17.
    num_nonlayer_fragments: Count = key(1, unit="fragments", resume=DROPS)
    """Fragments reserved for embedding, head and final norm; several split the vocabulary."""
    # arXiv 2501.18512 section 3.3.1 finds strided slightly better.
    use_sequential_layers: Bool = key(False, resume=DROPS)
    """Put neighbouring layers into one fragment. false: layer i belongs to fragment i mod P."""
    # The paper uses 1 and advises at most 5.
    num_communication_overlapping_steps: Natural = key(
        0, unit="inner steps", resume=DROPS, start_here=True
    )
    """Inner steps between sending a fragment and applying its exchange (tau). 0: plain DiLoCo."""
    # arXiv 2501.18512 section 3.3.2 compares 0 and 0.5.
    communication_overlapping_alpha: Share = key(0.0, resume=FREE)
    """Mixing weight alpha: new parameters = alpha * local + (1 - alpha) * outer."""
    # arXiv 2502.12996.
    diloco_round_overlap: Literal["none", "delayed", "eager"] = key("none", resume=DROPS)
    """Overlap with a whole round: delayed applies the last mean, eager adds its own fresh term."""

    @rule
    def _check_fragments(self: Any) -> None:
        fragments, nonlayer = self.num_diloco_fragments, self.num_nonlayer_fragments
        if not self.enable_streaming_diloco:
            require_default(
                self,
                "num_diloco_fragments num_nonlayer_fragments use_sequential_layers",
                "enable_streaming_diloco=false",
                "enable_streaming_diloco=true",
            )
        most = self.base_num_decoder_layers + nonlayer
        if fragments > most:
            raise ConfigError(
                f"num_diloco_fragments={fragments} exceeds layers {self.base_num_decoder_layers} + "
                f"num_nonlayer_fragments {nonlayer} = {most}, so some fragments would be empty. "
                f"Use {most} or fewer."
            )
        if self.vocab_size != "auto" and nonlayer > self.vocab_size:
            raise ConfigError(
                f"num_nonlayer_fragments={nonlayer} exceeds vocab_size={self.vocab_size}: they "
                "share the rows of the vocabulary, and some would be empty. Use "
                f"{self.vocab_size} or fewer."
            )
        if nonlayer != 1 and nonlayer >= fragments:
            raise ConfigError(
                f"num_nonlayer_fragments={nonlayer} leaves no fragment of "
                f"num_diloco_fragments={fragments} to the layers. Use "
                f"num_diloco_fragments={nonlayer + 1} or more."
            )
        with checks.as_config_error():
            schedule.check_counts(
                H=self.diloco_sync_period,
                P=fragments,
                tau=self.num_communication_overlapping_steps,
                round_overlap=self.diloco_round_overlap,
                names=_SCHEDULE,
            )


class DilocoExchange(Group):
    """The exchange of outer gradients."""

    group: ClassVar[str] = "diloco"
    heading: ClassVar[str] = "exchange of outer gradients"

    # arXiv 2501.18512 finds 4 bits as good as float32.
    diloco_exchange_dtype: Literal["float32", "bfloat16", "int8", "float4_e3m0", "int2", "topk"] = (
        key("float32", resume=DROPS, start_here=True)
    )
    """Wire format of outer gradients."""
    # int2 and topk are meant for it: arXiv 2505.23725 and 2508.15706.
    diloco_error_feedback: Literal["auto", "always", "never"] = key("auto", resume=DROPS)
    """Add the error-feedback residual to the next outer gradient. auto: with int2 and topk."""
    # arXiv 2604.21428 has radial_directional_mean, for eight and more replicas.
    diloco_aggregation: Literal["mean", "radial_directional_mean"] = key("mean", resume=FREE)
    """Aggregation of outer gradients: mean, or per tensor the mean norm times mean direction."""
    diloco_collective: Literal["auto", "all_gather", "reduce_scatter"] = key("auto", resume=DROPS)
    """Collective of an exchange. auto: reduce_scatter from 4 slices on, where it is possible."""
    diloco_transport: Literal["auto", "xla", "host"] = key("auto", resume=FREE)
    """Exchange inside compiled programs (xla), or by host memory and TCP. auto: by the devices."""

    @rule
    def _check_exchange(self: Any) -> None:
        with checks.as_config_error():
            combinations.check(
                collective=self.diloco_collective,
                aggregation=self.diloco_aggregation,
                exchange_dtype=self.diloco_exchange_dtype,
                round_overlap=self.diloco_round_overlap,
                error_feedback=self.diloco_error_feedback == "always",
                names=_COMBINATIONS,
            )


class Islands(Group):
    """Elastic training over a store."""

    group: ClassVar[str] = "islands"
    title: ClassVar[str] = (
        "programs that train one model through a store (docs/howto/operate-islands.md)"
    )

    enable_islands: Bool = key(False, from_checkpoint=False)
    """Be an island among others that come and go, with one replica."""
    islands_store: str = key("", resume=FREE, from_checkpoint=False)
    """Store of the islands: gs://, s3:// or az://bucket/folder, or a folder that all share."""
    island_name: str = key("", from_checkpoint=False)
    """Name of this island, unique in the store."""
    islands_min_members: Annotated[int, Ge(1), Le(999), INTEGER] = key(
        1, unit="islands", from_checkpoint=False
    )
    """Minimum number of islands that must contribute to an outer step."""
    islands_period_seconds: Positive = key(60.0, unit="seconds", resume=FREE, from_checkpoint=False)
    """Interval at which an island sends a fragment, whatever the speed of its steps."""
    islands_dead_seconds: Positive = key(60.0, unit="seconds", resume=FREE, from_checkpoint=False)
    """Time without a heartbeat after which the others continue without an island."""
    islands_key: str = key("", resume=FREE, from_checkpoint=False)
    """Private key that signs what this island sends (ssh-keygen -t ed25519, chmod 600)."""

    @rule
    def _check_islands(self: Any) -> None:
        if not self.enable_islands:
            require_default(
                self,
                "islands_store island_name islands_min_members islands_period_seconds "
                "islands_dead_seconds islands_key",
                "enable_islands=false",
                "enable_islands=true",
            )
            return
        if not self.enable_diloco:
            raise ConfigError(
                "enable_islands=true cannot be combined with enable_diloco=false: islands exchange "
                "outer gradients. Use enable_diloco=true."
            )
        if not self.islands_store:
            raise ConfigError(
                "enable_islands=true requires islands_store. Set it to s3://bucket/folder, or to "
                "a folder that all machines share."
            )
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", self.island_name):
            raise ConfigError(
                f"island_name={self.island_name} is not a name, which enable_islands=true "
                "requires. Use up to 64 letters, digits, '_' and '-', and another name for each "
                "island."
            )
        for name in (
            "num_diloco_replicas", "dcn_diloco_parallelism", "ici_diloco_parallelism"
        ):  # fmt: skip
            if getattr(self, name) not in ("auto", -1, 1):
                raise ConfigError(
                    f"{name}={getattr(self, name)} cannot be combined with enable_islands=true: "
                    "an island has one replica. Leave it out, and start more islands."
                )
        require_default(
            self,
            "diloco_collective diloco_transport",
            "enable_islands=true",
            "enable_islands=false",
        )
        if self.diloco_round_overlap != "none":
            raise ConfigError(
                f"diloco_round_overlap={self.diloco_round_overlap} cannot be combined with "
                "enable_islands=true: a log record is applied once. Use diloco_round_overlap=none "
                "and num_communication_overlapping_steps."
            )
        if self.diloco_outer_optimizer == "adam":
            raise ConfigError(
                "diloco_outer_optimizer=adam cannot be combined with enable_islands=true, whose "
                "hosts compute the outer step. Use nesterov or sgd."
            )
        if self.load_full_state_path:
            raise ConfigError(
                f"load_full_state_path={self.load_full_state_path} cannot be combined with "
                "enable_islands=true: the log has the state. Use load_parameters_path, which "
                "begins a new log."
            )
        if self.dataset_per_replica:
            raise ConfigError(
                "dataset_per_replica=true cannot be combined with enable_islands=true: any "
                "island may read any block of the data. Use weights."
            )
        if self.grain_worker_count >= 1:
            raise ConfigError(
                f"grain_worker_count={self.grain_worker_count} cannot be combined with "
                "enable_islands=true, where this process leases what is read next. Use "
                "grain_worker_count=0."
            )
