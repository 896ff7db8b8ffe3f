"""Keys of DiLoCo: replicas, fragments, the exchange of outer gradients, and islands."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from maxdiloco.config import checks
from maxdiloco.config.fields import DROPS, FREE, Group, key
from maxdiloco.config.values import (
    INTEGER,
    Auto,
    Count,
    Natural,
    NonNegative,
    Positive,
    Share,
    ShareBelowOne,
    matching,
)
from maxdiloco.diloco import combinations, schedule

# Names of the settings in the messages of the shared checks.
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


LAYERS = "base_num_decoder_layers num_nonlayer_fragments"
ISLAND_NAME = matching(r"[A-Za-z0-9_-]{0,64}", "up to 64 letters, digits, '_' and '-'")


class Diloco(Group, group="diloco"):
    """Replicas, outer optimizer and exchange (docs/concepts)."""

    enable_diloco: bool = key(True, start_here=True)
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

    def _check(self: Any) -> None:
        dcn, ici = self.dcn_diloco_parallelism, self.ici_diloco_parallelism
        if dcn * ici > 0 and self.num_diloco_replicas != "auto":
            schedule.check_replicas(
                self.num_diloco_replicas,
                dcn * ici,
                name="num_diloco_replicas",
                axis_size_name=f"dcn diloco {dcn} * ici diloco {ici} =",
            )


class DilocoFragments(Group, group="diloco"):
    """Fragments and overlap (Streaming DiLoCo, arXiv 2501.18512)."""

    enable_streaming_diloco: bool = key(False, resume=DROPS, start_here=True)
    """Exchange the parameters in num_diloco_fragments parts, one after the other in a period."""
    num_diloco_fragments: Count = key(1, unit="fragments", resume=DROPS, start_here=True)
    """Number of fragments (P). The paper has three layers in each, and one for the embedding."""
    # arXiv 2501.18512, figure 17.
    num_nonlayer_fragments: Count = key(1, unit="fragments", resume=DROPS)
    """Fragments reserved for embedding, head and final norm; several split the vocabulary."""
    # arXiv 2501.18512 section 3.3.1 finds strided slightly better.
    use_sequential_layers: bool = key(False, resume=DROPS)
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

    def _check(self: Any) -> None:
        fragments, nonlayer = self.num_diloco_fragments, self.num_nonlayer_fragments
        for name, most, because in (
            ("num_diloco_fragments", self.base_num_decoder_layers + nonlayer, LAYERS),
            ("num_nonlayer_fragments", self.vocab_size, "vocab_size"),
            ("num_nonlayer_fragments", max(1, fragments - 1), "num_diloco_fragments"),
        ):
            met = most == "auto" or getattr(self, name) <= most
            checks.expect(self, met, name, f"at most {most}", because)
        schedule.check_counts(
            H=self.diloco_sync_period,
            P=fragments,
            tau=self.num_communication_overlapping_steps,
            round_overlap=self.diloco_round_overlap,
            names=_SCHEDULE,
        )


class DilocoExchange(Group, group="diloco"):
    """Exchange of outer gradients."""

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
    """Collective of an exchange. auto: reduce_scatter from 4 slices on, if it is possible."""
    diloco_transport: Literal["auto", "xla", "host"] = key("auto", resume=FREE)
    """Exchange inside compiled programs (xla), or by host memory and TCP. auto: by the devices."""

    def _check(self: Any) -> None:
        combinations.check(
            collective=self.diloco_collective,
            aggregation=self.diloco_aggregation,
            exchange_dtype=self.diloco_exchange_dtype,
            round_overlap=self.diloco_round_overlap,
            error_feedback=self.diloco_error_feedback == "always",
            names=_COMBINATIONS,
        )


class Islands(Group, group="islands"):
    """Programs that train one model through a store (docs/howto/operate-islands.md)."""

    enable_islands: bool = key(False, from_checkpoint=False)
    """Be an island among others that come and go, with one replica."""
    islands_store: str = key("", resume=FREE, from_checkpoint=False)
    """Store of the islands: gs://, s3:// or az://bucket/folder, or a folder that all share."""
    island_name: Annotated[str, ISLAND_NAME] = key("", from_checkpoint=False)
    """Name of this island, unique in the store."""
    islands_min_members: Annotated[int, Ge(1), Le(999), INTEGER] = key(
        1, unit="islands", from_checkpoint=False
    )
    """Minimum number of islands that must contribute to an outer step."""
    islands_global_batch_size: Count | None = key(None, unit="sequences", from_checkpoint=False)
    """Sequences of an inner step of all living islands together. null: each has its own batch."""
    islands_period_seconds: Positive | Auto = key(
        60.0, unit="seconds", resume=FREE, from_checkpoint=False
    )
    """Interval at which an island sends a fragment. auto: by the link, the steps and outages."""
    islands_dead_seconds: Positive = key(60.0, unit="seconds", resume=FREE, from_checkpoint=False)
    """Time without a heartbeat after which the others continue without an island."""
    islands_key: str = key("", resume=FREE, from_checkpoint=False)
    """Private key that signs its messages and heartbeats (ssh-keygen -t ed25519, chmod 600)."""

    def _check(self: Any) -> None:
        if not self.enable_islands:
            return
        checks.expect(self, self.islands_store, "islands_store", "a store", "enable_islands")
        checks.expect(self, self.island_name, "island_name", "a unique name", "enable_islands")
        for name, allowed, reason in (
            ("enable_diloco", (True,), "islands exchange outer gradients"),
            ("num_diloco_replicas", ("auto", 1), "an island has one replica"),
            ("dcn_diloco_parallelism", (-1, 1), "an island has one replica"),
            ("ici_diloco_parallelism", (-1, 1), "an island has one replica"),
            ("diloco_collective", ("auto",), "islands exchange through the store"),
            ("diloco_transport", ("auto",), "islands exchange through the store"),
            ("diloco_round_overlap", ("none",), "records are applied once"),
            ("diloco_outer_optimizer", ("nesterov", "sgd"), "hosts compute the outer step"),
            ("load_full_state_path", ("",), "load_parameters_path starts a new log"),
            ("dataset_per_replica", (False,), "any island may read any block of the data"),
            ("grain_worker_count", (0,), "the process itself leases the blocks it reads"),
        ):
            checks.require(self, name, allowed, "enable_islands", reason)
        if self.islands_global_batch_size is not None:
            reason = "the part of an island determines its micro-batches"
            batch = "islands_global_batch_size"
            checks.require(self, "gradient_accumulation_steps", (1,), batch, reason)
