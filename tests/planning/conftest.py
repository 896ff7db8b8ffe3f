"""Plans from the command line."""

import json

import pytest
from run import run_program

from maxdiloco import plan
from maxdiloco.config import config
from maxdiloco.planning import candidates, forecast, proposal, rating
from maxdiloco.planning.job import describe_job


@pytest.fixture
def planned(tmp_path):
    """Call the planner; return the plan of its report, or None, and its Run."""

    def planned(*argv):
        path = tmp_path / "plan.json"
        path.unlink(missing_ok=True)
        run = run_program(plan.main, *argv, f"report={path}")
        return json.loads(path.read_text()) if path.exists() else None, run

    return planned


@pytest.fixture
def proposed(monkeypatch):
    """Propose plans of one job for several links, with the traffic of a candidate counted once."""

    def proposed(*argv, step_s, slice_gbps):
        job = describe_job(config.load(argv, {}))
        families = candidates.families(job, config.user_keys(argv, {}))
        known = {each: rating.traffic(job, each) for family in families for each in family}
        monkeypatch.setattr(rating, "traffic", lambda job, each: known[each])
        law, tokens = forecast.fit(forecast.read_rows()), 20.0 * job.num_parameters
        for gbps in slice_gbps:
            link, share = rating.Link(gbps / job.per_slice), (job.per_slice, "slice")
            unrated = proposal.Plan(job, rating.Step(step_s), link, share, argv, law, tokens, "20")
            yield proposal.propose(unrated, families, has_time=True, say=print)

    return proposed
