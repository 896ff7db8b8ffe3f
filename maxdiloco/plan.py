"""Plan a run over a slow link: `python -m maxdiloco.plan`.

The arguments are the flags of maxdiloco.train and the bandwidth of the link between slices. The
time of an inner step is read from step_time, or estimated by compiling it for compile_topology. For
GPUs, and for TPUs without libtpu, it is guessed from the chip. The exit code is 1 if no candidate
fits the link.
"""

import os
from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace

from maxdiloco import train_compile
from maxdiloco.command_line import Option, guarded, read_options
from maxdiloco.config import config, help
from maxdiloco.config.values import LARGEST
from maxdiloco.errors import ConfigError
from maxdiloco.output import say

OPTIONS = MappingProxyType({
    "step_time": Option(None, "measured time of an inner step without an exchange [s]; then "
                        "nothing is compiled", float, 0),
    "dcn_bandwidth_gbps": Option(None, "one device's share of the link between slices [Gbit/s]",
                                 float, 0),
    "host_bandwidth_gbps": Option(None, "bandwidth of a host's link [Gbit/s], instead of "
                                  "dcn_bandwidth_gbps", float, 0),
    "slice_bandwidth_gbps": Option(None, "bandwidth of a slice's link [Gbit/s], instead of "
                                   "dcn_bandwidth_gbps", float, 0),
    "latency_ms": Option(None, "time from one slice to another, half a round trip [ms]; none: 0",
                         float, 0),
    "tokens": Option(None, "tokens to train on, instead of steps; without both, 20 for each "
                     "parameter", float, 0),
    "price_per_device_hour": Option(None, "price of one device for an hour, in any currency",
                                    float, 0),
    "price_per_gb": Option(None, "price of 1e9 bytes from one slice to another, in the same "
                           "currency", float, 0),
    "details": Option(False, "print all rows of the table and the meaning of its columns", bool),
    "report": train_compile.OPTIONS["report"],
})  # fmt: skip
EXAMPLES = (  # 8B on two hosts of eight H100s, not needed here; a model with a measured step time
    "model_name=llama3-8b compile_topology=h100-8 compile_topology_num_slices=2 "
    "slice_bandwidth_gbps=1 tokens=200e9",
    "model_name=tiny dcn_diloco_parallelism=2 step_time=0.4 slice_bandwidth_gbps=0.01",
)
# Options for the bandwidth of the link between slices: per device, per host, per slice.
LINKS = ("dcn_bandwidth_gbps", "host_bandwidth_gbps", "slice_bandwidth_gbps")
TOKENS = 20  # tokens per parameter, as in the papers' tables of losses (2503.09799 Tab. 3)


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    if words := help.help_words(argv):
        say(train_compile.help_text("maxdiloco.plan", words[1:], OPTIONS, EXAMPLES))
        return 0
    options, keys = read_options(argv, OPTIONS, "plan", keys=True)
    cfg = config.load(keys, os.environ)
    names = [name for name in LINKS if vars(options)[name] is not None]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} name the same link. Give one of them.")
    if not names:
        raise ConfigError(
            "dcn_bandwidth_gbps is not given, and the plan is for a link. Give one device's share "
            "in Gbit/s, or host_bandwidth_gbps or slice_bandwidth_gbps."
        )
    if not cfg.compile_topology and options.step_time is None:
        raise ConfigError(
            "step_time is not given and compile_topology is empty, so the time of a step is "
            "unknown. Give step_time=0.8 (seconds), or compile_topology=v5e-16 or h100-8 with "
            "compile_topology_num_slices=2."
        )
    from maxdiloco.run import tokenizer as run_tokenizer

    return _plan(run_tokenizer.resolve_vocab_size(cfg), options, keys, names[0])


def _plan(cfg: config.Config, options: SimpleNamespace, keys: Sequence[str], link: str) -> int:
    from maxdiloco.planning import candidates, forecast, proposal, recommendation, table
    from maxdiloco.planning.job import describe_job
    from maxdiloco.planning.rating import Link, Step
    from maxdiloco.storage import output_file

    output_file.check_path("report", options.report)
    job, user_keys = describe_job(cfg), config.user_keys(keys, os.environ)
    say_line = train_compile.say_line
    families = candidates.families(job, user_keys)
    if not families:
        raise ConfigError(
            "diloco_sync_period, num_diloco_fragments and num_communication_overlapping_steps: no "
            "mode allows this combination of values. Leave one of the keys out."
        )
    sharing = ((1, "device"), (job.per_host, "host"), (job.per_slice, "slice"))
    share = sharing[LINKS.index(link)]
    latency_s = (options.latency_ms or 0.0) / 1e3
    tokens, origin = _tokens(
        cfg,
        options.tokens,
        has_steps="steps" in user_keys,
        a_step=job.tokens,
        parameters=job.num_parameters,
    )
    unrated = proposal.Plan(
        job,
        Step(options.step_time or 1.0),
        Link(vars(options)[link] / share[0], latency_s),
        share,
        keys,
        forecast.fit(forecast.read_rows()),
        tokens,
        origin,
        (options.price_per_device_hour, options.price_per_gb),
    )
    has_time = options.step_time is not None
    plan = proposal.propose(unrated, families, has_time=has_time, say=say_line)
    views = [*recommendation.lines(plan), "", *table.setting(plan), ""]
    for line in [*views, *table.lines(plan, details=options.details)]:
        say_line(line)
    figures = table.as_json(plan) | {"answer": recommendation.as_json(plan)}
    output_file.write_json("report", options.report, figures)
    return train_compile.refuse(table.refusals(plan))


def _tokens(
    cfg: config.Config, tokens: float | None, *, has_steps: bool, a_step: int, parameters: int
) -> tuple[float, str]:
    """Return the number of tokens to train on, and its origin for the report.

    tokens: value of the option tokens. a_step: tokens of a step.
    """
    has_steps = has_steps and cfg.steps != "all"
    if has_steps and tokens is not None:
        raise ConfigError(
            f"steps={cfg.steps} and tokens={tokens:g} both say how long to train. Give one of them."
        )
    if has_steps:
        return cfg.steps * a_step, f"steps={cfg.steps}"
    if tokens is not None:
        if tokens / a_step > LARGEST:
            raise ConfigError(
                f"tokens={tokens:g} are {tokens / a_step:.3g} steps of {a_step} tokens, and "
                f"{LARGEST} are the most. Use fewer tokens."
            )
        return tokens, "as given"
    return TOKENS * parameters, f"{TOKENS} a parameter, without tokens= or steps="


if __name__ == "__main__":
    main()
