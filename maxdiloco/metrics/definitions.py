"""The metrics of a run: name, unit, meaning, when to look at them, and their panel in the report.

`scripts/metrics_page.py` writes the tables of docs/reference/metrics.md from this module, and the
report takes its panels from it. A metric's value is computed where the trainer knows it, not here.
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """Definition of one metric, or of one family of metrics.

    name: as in a row of metrics.jsonl. {replica} stands for a number, {text} and {source} for the
      name of a text of eval_dataset_path and of a source of dataset_mixture.
    unit: of the value. "1" is a ratio or a count without a unit.
    meaning: a sentence for the documents, and the note below a panel's title.
    look_when: the value or change that calls for a closer look; empty for a metric that only
      informs.
    panel: title of the panel that the report draws it in; empty for a folded panel of its own.
    label: of the line in a panel of several lines. The braces of the name may appear in it.
    role: how the report draws the line: "mean", "outer", "replica" or "line".
    """

    name: str
    unit: str
    meaning: str
    look_when: str = ""
    panel: str = ""
    label: str = ""
    role: str = "line"

    def match(self, name: str) -> str | None:
        """Return the label of a metric with this name, or None if this is not its definition."""
        pattern = re.escape(self.name)
        for placeholder, values in _PLACEHOLDERS.items():
            pattern = pattern.replace(
                re.escape(f"{{{placeholder}}}"), f"(?P<{placeholder}>{values})"
            )
        found = re.fullmatch(pattern, name)
        return self.label.format(**found.groupdict()) if found else None


_PLACEHOLDERS = {"replica": r"\d+", "text": r".+", "source": r".+"}

LOSS = "Loss"
OUTER_LOSS = "Loss of the outer parameters"

# The report's panels have the same order. The documents group the metrics by their prefixes.
METRICS = (
    Metric(
        "learning/loss", "nats/token",
        "Training loss, mean over the replicas and over the steps since the previous row.",
        "It rises over many rows, or stays above the run it is compared with.",
        LOSS, "mean of the replicas", "mean",
    ),
    Metric(
        "learning/loss_replica_{replica}", "nats/token",
        "The same for one replica.",
        "One replica departs from the others: its data, or its devices.",
        LOSS, "replica {replica}", "replica",
    ),
    Metric(
        "eval/loss", "nats/token",
        "Loss of the outer parameters on the held-out text. With eager updates each slice "
        "evaluates its own outer parameters on its share of the text.",
        "The gap to `learning/loss` grows; see troubleshooting.",
        OUTER_LOSS, "outer parameters, held-out text", "outer",
    ),
    Metric(
        "eval/{text}/loss", "nats/token",
        "The same for each named text of `eval_dataset_path`.",
        "One text falls behind the others.",
        "Loss of the outer parameters by text", "{text}", "outer",
    ),
    Metric("eval/perplexity", "1", "Exponential of `eval/loss`."),
    Metric("eval/{text}/perplexity", "1", "Exponential of the loss of a named text."),
    Metric(
        "eval/bits_per_byte", "bit/byte",
        "Cross entropy per byte of the held-out text; only of text.",
        "You compare runs with different tokenizers.",
    ),
    Metric("eval/{text}/bits_per_byte", "bit/byte", "The same for each named text."),
    Metric(
        "learning/lr", "1", "Inner learning rate of this step.",
        "The loss jumps: is the warm-up over?",
        "Learning rate", "learning rate",
    ),
    Metric(
        "learning/grad_norm", "1",
        "Norm of the gradient of this step before clipping, mean over the replicas.",
        "It stays above `gradient_clipping_threshold`, or spikes.",
        "Gradient norm", "gradient norm",
    ),
    Metric(
        "learning/skipped", "steps",
        "Steps since the previous row that a replica skipped, mean over the replicas; with "
        "`nan_policy=skip`. `learning/loss` is the mean of the other steps.",
        "It is not 0.",
    ),
    Metric(
        "learning/z_loss", "nats/token",
        "Squared log normaliser of this step times `z_loss_multiplier`, mean over the replicas; "
        "not included in `learning/loss`.",
        "It grows: the logits drift.",
    ),
    Metric(
        "learning/load_balance_loss", "1",
        "Load-balance loss of the experts in this step, mean over the replicas, weight included.",
        "It rises while the shares of the experts spread.",
    ),
    Metric(
        "learning/router_z_loss", "1",
        "Router z-loss of this step, mean over the replicas, weight included.",
        "It grows: the router's logits drift.",
    ),
    Metric(
        "learning/tokens", "tokens",
        "Tokens read by all replicas since step 1, padding included.",
    ),
    Metric(
        "moe/max_expert_share", "1",
        "Tokens of the fullest expert over the mean of all experts, mean over the layers; "
        "1 is even.",
        "It is above 2: the experts are out of balance.",
    ),
    Metric(
        "moe/min_expert_share", "1",
        "Tokens of the emptiest expert over the mean of all experts, mean over the layers.",
        "It is near 0: an expert is unused.",
    ),
    Metric(
        "moe/router_entropy", "nats",
        "Entropy of a token's router scores, mean; `ln(num_experts)` is undecided.",
        "It stays at `ln(num_experts)`, or falls to 0.",
    ),
    Metric(
        "data/tokens_{source}", "tokens",
        "Tokens read of one source of a mixture, padding included.",
    ),
    Metric(
        "data/padding", "1", "Fraction of padding among this step's tokens, if a packing pads.",
        "It is large: pack the documents.",
    ),
    Metric(
        "data/epoch", "epochs", "How often the text was read so far, such as 0.25.",
        "It exceeds 1: the text repeats.",
    ),
    Metric("data/epoch_{source}", "epochs", "The same for each source of a mixture."),
    Metric(
        "diloco/outer_grad_norm", "1",
        "Norm of the mean outer gradient of the fragment synchronised last, as it was sent.",
        "It rises from round to round.",
        "Outer gradient norm", "outer gradient norm",
    ),
    Metric(
        "diloco/outer_grad_cosine", "-1 to 1",
        "Mean cosine over pairs of replicas of the outer gradients of the fragment synchronised "
        "last, weighted by the product of their norms.",
        "It is near 1 (overshoot) or near 0 (the replicas learn different things).",
        "Cosine of the outer gradients", "cosine",
    ),
    Metric(
        "diloco/outer_update_ratio", "1",
        "Norm of the last update of the outer parameters over their norm, of the fragment "
        "synchronised last. With eager updates: the ratio of one replica of process 0.",
        "It is 0.4 or more, or rises.",
        "Outer update", "outer update",
    ),
    Metric(
        "diloco/residual_norm", "1",
        "Norm of the error-feedback residual of the fragment sent last, mean over the replicas of "
        "process 0.",
        "It grows without end: the wire format is too coarse.",
        "Residual norm", "residual norm",
    ),
    Metric(
        "diloco/drift", "1",
        "Mean absolute difference between replica and outer parameters of the fragment "
        "synchronised last, when it was sent.",
        "It is much larger than with a shorter period.",
        "Drift", "drift",
    ),
    Metric(
        "perf/step_time", "s",
        "Time of a step on process 0's clock, evaluations and saves excluded.",
        "It is far from the plan's, or rises.",
        "Step time", "step time",
    ),
    Metric(
        "perf/tokens_per_second", "tokens/s", "Speed of all replicas together.",
        "It falls: see `perf/step_time` and `dcn/waited_s`.",
        "Tokens per second", "tokens/s",
    ),
    Metric(
        "perf/tflops_per_device", "TFLOP/s",
        "FLOPs of the model, without recomputation, per device.",
    ),
    Metric(
        "perf/mfu", "1",
        "Model FLOPs utilisation: FLOPs of the model over the chip's bfloat16 peak, if that is "
        "known.",
        "It is far below the value of similar runs.",
    ),
    Metric(
        "perf/wall_time_s", "s",
        "Time since the program started; after a restart, plus the time up to the last row kept.",
    ),
    Metric(
        "dcn/bytes_sent", "B/step",
        "Bytes that a replica (in data parallelism: a slice) sends to all other slices, mean over "
        "the steps since the previous row.",
        "It differs from the plan's.",
        "Bytes sent per step", "bytes sent",
    ),
    Metric(
        "dcn/waited_s", "s",
        "Time that process 0 waited for exchanges through host memory since the previous row.",
        "It is not near 0: the exchange is longer than its overlap.",
        "Waited for exchanges", "waited",
    ),
    Metric(
        "islands/alive", "islands",
        "Islands with a recent heartbeat, including this one, by this one's clock.",
        "It falls: an island is away.",
        "Islands alive", "islands",
    ),
    Metric(
        "islands/progress", "1",
        "Committed tokens over the tokens of the whole run, as far as this island has applied the "
        "log.",
    ),
    Metric(
        "islands/committed_tokens", "tokens",
        "Tokens that the log of fragment 0 has committed, as far as this island has applied it.",
        "It stands still.",
        "Tokens in the log", "of all islands",
    ),
    Metric(
        "islands/own_tokens", "tokens",
        "This island's part of the committed tokens, over all starts that the log remembers.",
        "It stands still while the others' grow.",
        "Tokens in the log", "of this island",
    ),
    Metric(
        "islands/records", "records",
        "Records in the log of fragment 0, as far as this island has applied it.",
    ),
    Metric(
        "islands/period_seconds", "s",
        "Time between two messages of a fragment, fixed or automatic.",
        "It grows: a link has become slow, or was cut.",
    ),
    Metric(
        "islands/batch_size", "sequences",
        "Sequences of this island in the last step, with `islands_global_batch_size`.",
        "It changes: an island has joined or died.",
    ),
    Metric(
        "islands/undecided", "messages",
        "This island's messages that no record has decided, of all fragments.",
        "It grows: the store or the leader is away.",
        "Undecided messages", "undecided",
    ),
    Metric(
        "islands/requests", "1/step",
        "Requests to the store, mean over the steps since the previous row.",
        "It grows: retries, or a store that throttles.",
        "Requests to the store", "requests",
    ),
    Metric(
        "islands/bytes_received", "B/step",
        "Bytes received from the store, mean over the steps since the previous row. "
        "`dcn/bytes_sent` counts the bytes sent.",
    ),
    Metric(
        "device/memory_in_use_bytes", "B",
        "Memory in use on process 0's fullest device; not on a CPU.",
        "It grows from row to row.",
        "Device memory", "in use",
    ),
    Metric(
        "device/memory_peak_bytes", "B",
        "Peak memory of process 0's fullest device; not on a CPU.",
        "It is close to the device's memory.",
        "Device memory", "peak",
    ),
)  # fmt: skip


def find(name: str) -> Metric | None:
    """Return the definition of the metric with this name, or None."""
    return next((metric for metric in METRICS if metric.match(name) is not None), None)
