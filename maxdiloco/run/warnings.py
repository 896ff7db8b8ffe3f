"""Warnings and notes about settings that are rarely intended, for the start of a run's log."""

from collections.abc import Iterable, Iterator

from maxdiloco.config.keys import KEYS, Config
from maxdiloco.config.values import show

# Number of parameters above which a step of 1,000 tokens needs a minute or more on a CPU.
_LARGE_FOR_CPU = 500_000_000
# Below _FEW_ROUNDS rounds, results hardly allow conclusions about a mode. Below _FEW_FOR_MOMENTUM,
# an outer momentum above _SHORT_MOMENTUM, which averages over many rounds, costs loss
# (docs/reference/results.md, loss by mode).
_FEW_ROUNDS, _FEW_FOR_MOMENTUM, _SHORT_MOMENTUM = 100, 200, 0.7
# With at least this many replicas and such a period, the recipe's settings beat the defaults.
_MANY_REPLICAS, _LONG_PERIOD = 4, 20


def lines(cfg: Config) -> list[str]:
    """Return warnings, then notes, that depend only on the keys."""
    return [
        *(f"warning: {line}" for line in _warnings(cfg)),
        *(f"note: {line}" for line in _notes(cfg)),
    ]


def _warnings(cfg: Config) -> Iterator[str]:
    if cfg.opt_type == "sgd":
        names = ("adam_b1", "adam_b2", "adam_eps", "optimizer_memory_host_offload")
        yield from _without_effect(cfg, names, "opt_type")
    if cfg.opt_type != "muon":
        yield from _without_effect(cfg, ("muon_beta",), "opt_type")
    if not cfg.holds_out():
        yield from _without_effect(cfg, ("eval_fraction",), "eval_dataset_path")
    if cfg.diloco_round_overlap == "eager" and cfg.diloco_outer_optimizer == "adam":
        yield (
            "diloco_outer_optimizer=adam with diloco_round_overlap=eager: Adam is not linear, so a "
            "replica's own terms do not cancel and replicas drift apart. Use nesterov."
        )
    if cfg.enable_streaming_diloco and cfg.num_diloco_fragments == 1:
        yield (
            "num_diloco_fragments=1 with enable_streaming_diloco=true exchanges all parameters at "
            "once. Use a fragment for every three layers and one for the embedding."
        )
    if cfg.enable_diloco and cfg.steps != "all" and cfg.steps < cfg.diloco_sync_period:
        yield (
            f"steps={cfg.steps} ends before diloco_sync_period={cfg.diloco_sync_period}, so some "
            "or all parameters are never exchanged. Use a shorter period or more steps."
        )
    is_one = cfg.num_experts > 1 and cfg.num_experts_per_tok == 1
    if is_one and cfg.router.get("normalise_weights"):
        yield (
            "normalise_weights: true of router with num_experts_per_tok=1 gives every expert the "
            "weight 1, so the cross-entropy does not train the router. Use normalise_weights: "
            "false, or num_experts_per_tok=2 or more."
        )
    if cfg.compile_topology:
        yield (
            f"compile_topology={cfg.compile_topology} has an effect only in "
            "maxdiloco.train_compile. Leave it out here."
        )


def _without_effect(cfg: Config, names: Iterable[str], because: str) -> Iterator[str]:
    """Yield a line for each key that has no effect because of another key, but is set."""
    for name in names:
        value, other = vars(cfg)[name], show(vars(cfg)[because])
        if value != KEYS[name].default:
            yield f"{name}={show(value)} has no effect with {because}={other}. Leave it out."


def _notes(cfg: Config) -> Iterator[str]:
    if not cfg.enable_diloco or cfg.steps == "all" or cfg.steps < cfg.diloco_sync_period:
        return
    rounds = cfg.steps // cfg.diloco_sync_period
    counted = f"{rounds} round{'s' * (rounds != 1)} of diloco_sync_period={cfg.diloco_sync_period}"
    if rounds < _FEW_ROUNDS:
        yield (
            f"steps={cfg.steps} is only {counted}. Expect about 5% higher loss than data "
            "parallelism after 10 rounds and 1.9% after 50; in the papers' long runs it is under "
            "1%."
        )
    momentum = cfg.diloco_outer_momentum
    if rounds < _FEW_FOR_MOMENTUM and momentum != "auto" and momentum > _SHORT_MOMENTUM:
        yield (
            f"steps={cfg.steps} is only {counted}, few for diloco_outer_momentum={momentum:g}: 0.9 "
            "cost 8, 6 and 3% of loss after 10, 50 and 150 rounds. Set diloco_outer_momentum=0.6 "
            "and diloco_outer_lr=0.7, which cost 5, 1.4 and 1%."
        )


def device_lines(cfg: Config, *, platform: str, num_devices: int, num_parameters: int) -> list[str]:
    """Return warnings and notes that depend on the devices."""
    if platform != "cpu":
        return []
    found = []
    if cfg.hardware == "auto" and num_parameters >= _LARGE_FOR_CPU:
        found.append(
            f"warning: hardware=auto found no accelerator and uses this CPU, as {num_devices} "
            f"devices, for {num_parameters:,} parameters. Set hardware=tpu or hardware=gpu, which "
            "refuse to start without one, or hardware=cpu to keep the CPU."
        )
    if cfg.quantization != "none":
        found.append(
            f"note: quantization={cfg.quantization} is emulated on a CPU: it gives the values of "
            "an accelerator, but is slower than quantization=none."
        )
    return found


def run_lines(cfg: Config, *, num_replicas: int, num_tokens: int) -> list[str]:
    """Return warnings and notes that depend on the numbers of replicas and tokenizer's tokens."""
    found = []
    exchanges = cfg.enable_diloco and not cfg.enable_islands
    if exchanges and num_replicas == 1:
        found.append(
            "warning: enable_diloco=true with one replica is the Lookahead optimizer (arXiv "
            "1907.08610), not DiLoCo. Set dcn_diloco_parallelism (with hardware=cpu, or on several "
            "slices), or num_diloco_replicas=2 for two replicas that share the devices; "
            "enable_diloco=false gives the plain inner optimizer."
        )
    unused = 1 - num_tokens / cfg.vocab_size
    # A vocabulary that is rounded up to a multiple leaves less than half of the rows unused.
    if unused >= 0.5 and cfg.dataset_type != "synthetic":
        found.append(
            f"warning: vocab_size={cfg.vocab_size}, but tokenizer_type={cfg.tokenizer_type} has "
            f"{num_tokens} tokens: {unused:.0%} of the embedding's rows are never trained. Use "
            "vocab_size=auto, or a larger tokenizer (tokenizer_path)."
        )
    many = num_replicas >= _MANY_REPLICAS and cfg.diloco_sync_period >= _LONG_PERIOD
    if exchanges and many and cfg.opt_type == "adamw":
        found.append(
            f"note: {num_replicas} replicas have a higher loss than two. With opt_type=adamw and "
            "diloco_sync_period=30, four cost 6% and eight 10% compared with data parallelism at "
            "279,296 parameters; at 335M, 1 and 2% compared with one replica (2503.09799). "
            "With configs/recipes/many_replicas.yml they cost -0.7 and 0.6%."
        )
    return found
