"""Settings that work but are seldom meant. A line for each; needs neither JAX nor devices."""

from typing import Any

from maxdiloco.flags import base_yml, eval_paths, idle_keys

# A vocabulary so many times the tokenizer's is more than a round number: our choice.
_FAR_ABOVE = 2
# Rounds below which a run says little of a mode; and below which a momentum of 0.9, an average over
# ten rounds, costs loss: at 150 it did (benchmarks/README.md, what a mode costs in loss).
_FEW_ROUNDS, _FEW_FOR_MOMENTUM = 100, 200
_HIGH_MOMENTUM = 0.7
# Parameters of which a CPU takes a minute and more for a step of 1,000 tokens: our choice.
_LARGE_ON_CPU = 500_000_000


def warnings(cfg: Any) -> list[str]:
    """One line for each setting that works but is seldom meant."""
    lines = idle_keys.warnings(cfg)
    usual = base_yml.declared()["eval_fraction"].default
    if not eval_paths.holds_out(cfg) and cfg.eval_fraction != usual:
        lines.append(
            f"eval_fraction={cfg.eval_fraction} does nothing beside eval_dataset_path, which is "
            f"the held-out text. Leave one of them out."
        )
    if cfg.enable_diloco and 0 < cfg.steps < cfg.diloco_sync_period:
        lines.append(
            f"steps={cfg.steps} ends before diloco_sync_period={cfg.diloco_sync_period}: some or "
            f"all of the parameters are never exchanged. Use a shorter period or more steps."
        )
    return [f"warning: {line}" for line in lines]


def short_run(cfg: Any) -> list[str]:
    """What to expect of a run of few rounds; nothing of a longer one, and of data parallelism."""
    if not cfg.enable_diloco or cfg.steps < cfg.diloco_sync_period:
        return []
    rounds = cfg.steps // cfg.diloco_sync_period
    counted = "1 round" if rounds == 1 else f"{rounds} rounds"
    said = f"note: steps={cfg.steps} is {counted} of diloco_sync_period={cfg.diloco_sync_period}"
    lines = []
    if rounds < _FEW_ROUNDS:
        lines.append(
            f"{said}, few to judge a mode by: DiLoCo was 5 % of loss behind data parallelism after "
            "ten rounds and 1.4 % after 50, in the papers' long runs under 1 %."
        )
    if rounds < _FEW_FOR_MOMENTUM and cfg.diloco_outer_momentum > _HIGH_MOMENTUM:
        lines.append(
            f"{said}, few for diloco_outer_momentum={cfg.diloco_outer_momentum:g}: 0.9 was 8, 6 "
            "and 3 % behind after 10, 50 and 150 rounds. Set diloco_outer_momentum=0.6 and "
            "diloco_outer_lr=0.7, which made that 5, 1.4 and 1 %."
        )
    return lines


def of_run(cfg: Any, *, num_replicas: int, num_tokens: int) -> list[str]:
    """The same of what is known when devices and tokenizer are there.

    num_tokens: of the tokenizer.
    """
    lines = []
    if cfg.enable_diloco and num_replicas == 1:
        lines.append(
            "warning: enable_diloco=true with one replica: it exchanges with no other, which makes "
            "this the Lookahead optimizer (arXiv 1907.08610), not DiLoCo. Set "
            "dcn_diloco_parallelism (with hardware=cpu, or on several slices), or "
            "num_diloco_replicas=2 for two that share the devices; for the plain inner optimizer "
            "enable_diloco=false."
        )
    if cfg.dataset_type != "synthetic" and cfg.vocab_size >= _FAR_ABOVE * num_tokens:
        unused = 1 - num_tokens / cfg.vocab_size
        lines.append(
            f"warning: vocab_size={cfg.vocab_size}, but tokenizer_type={cfg.tokenizer_type} has "
            f"{num_tokens} tokens: {unused:.0%} of the embedding's rows are never trained. Use "
            "vocab_size=-1, or a larger tokenizer (tokenizer_path)."
        )
    return lines


def on_cpu(cfg: Any, devices: Any, num_parameters: int) -> list[str]:
    """A line on a large model on a CPU that nobody asked for. devices: array of jax.Device."""
    on_accelerator = devices.flat[0].platform != "cpu"
    if cfg.hardware != "auto" or on_accelerator or num_parameters < _LARGE_ON_CPU:
        return []
    return [
        f"warning: hardware=auto found no accelerator and takes this CPU, as {devices.size} "
        f"devices, for {num_parameters:,} parameters. Set hardware=tpu or hardware=gpu, which "
        "refuse to start without one, or hardware=cpu if you mean it."
    ]
