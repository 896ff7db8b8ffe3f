"""A plan: the candidates of a job on a link, rated, with the time of a step and the loss."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maxdiloco.diloco.schedule import REDUCE_SCATTER
from maxdiloco.errors import ConfigError
from maxdiloco.planning import forecast, link_model, rating, step_time
from maxdiloco.planning.candidates import settings_of
from maxdiloco.planning.forecast import Case, Forecast, Law
from maxdiloco.planning.job import Candidate, Job
from maxdiloco.planning.rating import Link, RatedCandidate, Step
from maxdiloco.run.remat_choice import MIB, memory_remedies


@dataclass(frozen=True)
class Plan:
    """Rated candidates, best first, with the job and the link of the plan."""

    job: Job
    step: Step
    link: Link
    share: tuple[int, str]  # number of devices that share the user's link, and their unit
    keys: Sequence[str]  # of the command line of the plan, without its options
    law: Law  # of the losses
    tokens: float  # to train on
    tokens_origin: str
    prices: tuple[float | None, float | None] = (None, None)  # of a device-hour, of a gigabyte
    rows: Sequence[RatedCandidate] = ()
    undemanding: RatedCandidate | None = None  # see rating.least_demanding

    def case(self, candidate: Candidate) -> Case:
        """Return the settings that the loss of a candidate depends on."""
        job, size = self.job, self.job.num_parameters
        return Case(
            size,
            job.num_replicas,
            candidate.H,
            candidate.tau,
            candidate.wire,
            candidate.overlap,
            inner=job.cfg.opt_type,
            tokens=self.tokens / size,
            batch=job.tokens,
            layers="mixture of experts" if job.cfg.num_experts > 1 else "dense",
        )

    def forecast(self, candidate: Candidate) -> Forecast:
        """Return the forecast of the loss of a candidate."""
        return forecast.predict(self.law, self.case(candidate))

    @property
    def data_parallel(self) -> float:
        """Return the utilisation of data parallelism on the same link, by the papers' simulator.

        The bytes are counted as in this trainer, which sends the gradient of each micro-batch.
        """
        job, micro_batches = self.job, self.job.cfg.gradient_accumulation_steps
        return link_model.data_parallel(
            job.model.config.num_layers,
            job.num_parameters,
            self.step.seconds / micro_batches,
            gbps=self.link.gbps * job.per_slice,
            latency_s=self.link.latency_s,
            bits=8 * job.gradient_bytes / micro_batches / job.num_parameters,
        )

    def reduce_scatters(self, row: RatedCandidate) -> bool:
        """Tell whether a candidate uses reduce-scatter."""
        return settings_of(self.job, row.candidate).collective == REDUCE_SCATTER

    def is_moved(self, row: RatedCandidate) -> bool:
        """Tell whether a candidate fits the chip only with its outer state in host memory."""
        return row.candidate.memory != self.job.configured.memory


def propose(
    unrated: Plan,
    families: Sequence[Sequence[Candidate]],
    *,
    has_time: bool,
    say: Callable[[str], None],
) -> Plan:
    """Return the plan with rated candidates, and with the time of a step.

    Args:
      unrated: a plan without rows.
      families: see candidates.families.
      has_time: whether the user gave the time of a step.
      say: prints a line of progress.

    Raises:
      ConfigError: no candidate fits the chip.
    """
    job, cfg = unrated.job, unrated.job.cfg
    candidates = itertools.chain.from_iterable(families)
    sent = {candidate: rating.traffic(job, candidate) for candidate in candidates}

    def rated(step: Step) -> Plan:
        link = unrated.link
        rows = rating.rank(job, families, sent=sent, step=step, link=link, loss=unrated.forecast)
        undemanding = rating.least_demanding(job, families, sent=sent, step=step, link=link)
        if not any(row.fits for row in rows):
            least = min(row.memory_bytes for row in rows) / MIB
            raise ConfigError(
                f"model_name={cfg.model_name} does not fit {cfg.compile_topology}: every candidate "
                f"needs at least {least:,.0f} MiB a device, which has {job.chip.hbm / MIB:,.0f}. "
                f"{memory_remedies(cfg, outer_state=False)}"  # the plan has tried pinned_host
            )
        return dataclasses.replace(unrated, step=step, rows=rows, undemanding=undemanding)

    if has_time:
        return rated(unrated.step)
    if not step_time.can_compile(cfg.compile_topology):
        return rated(step_time.estimate(cfg, job))
    rated(unrated.step)  # refuse a model whose state does not fit before compiling
    return rated(step_time.compile_plain_step(cfg, gbps=unrated.link.gbps, say=say))
