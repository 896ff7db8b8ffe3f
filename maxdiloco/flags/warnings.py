"""Settings that work but are seldom meant, of together.yml. Needs neither JAX nor devices."""

from typing import Any

from maxdiloco.flags import base_yml, eval_paths, idle_keys


def warnings(cfg: Any) -> list[str]:
    """One line for each setting that works but is seldom meant."""
    lines = idle_keys.lines(cfg)
    usual = base_yml.declared()["eval_fraction"].default
    if not eval_paths.holds_out(cfg) and cfg.eval_fraction != usual:
        lines.append(
            f"warning: eval_fraction={cfg.eval_fraction} does nothing beside eval_dataset_path, "
            "which is the held-out text. Leave one of them out."
        )
    return lines


def short_run(cfg: Any) -> list[str]:
    """What to expect of a run of few rounds; nothing of a longer one, and of data parallelism."""
    rounds = cfg.steps // cfg.diloco_sync_period
    return idle_keys.lines(cfg, rounds=rounds, counted=f"{rounds} round{'s' * (rounds != 1)}")


def of_run(cfg: Any, *, num_replicas: int, num_tokens: int) -> list[str]:
    """The same of what is known when devices and tokenizer are there.

    num_tokens: of the tokenizer.
    """
    unused = 1 - num_tokens / cfg.vocab_size
    return idle_keys.lines(
        cfg, num_replicas=num_replicas, num_tokens=num_tokens, unused_rows=unused
    )


def on_cpu(cfg: Any, devices: Any, num_parameters: int) -> list[str]:
    """A line on a large model on a CPU that nobody asked for. devices: array of jax.Device."""
    platform, count = devices.flat[0].platform, devices.size
    return idle_keys.lines(cfg, platform=platform, num_devices=count, num_parameters=num_parameters)
