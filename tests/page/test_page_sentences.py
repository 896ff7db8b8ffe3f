"""The sentences at the top of the page: what they say, in a terminal, and their links."""

import re

import numpy as np
import synthetic_runs
from synthetic_runs import DEFAULTS, FALLING, ROWS, run_of

from maxdiloco import report
from maxdiloco.page import html, verdict


def test_the_sentences_are_printed_in_a_terminal_and_no_file_is_written(tmp_path, capsys):
    folder = synthetic_runs.write(tmp_path / "a", steps=20)
    assert report.main([str(folder), "--text"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Healthy: the loss falls") and max(map(len, said)) <= 100
    assert "It is at step 20." in " ".join(" ".join(said).split())
    assert not (folder / "report.html").exists()


def exchanged(*, cosine=0.4, update=0.1, drift=(0.02, 0.01)):
    """Two replicas with an exchange in every row; drift: the first and the last."""
    columns = {"diloco/outer_grad_cosine": np.full(ROWS, cosine)}
    columns["diloco/outer_update_ratio"] = np.full(ROWS, update)
    columns["diloco/drift"] = np.geomspace(*drift, ROWS)
    return run_of(columns=columns | {"learning/loss": FALLING})


def test_cosine_update_and_drift_are_judged_by_what_a_healthy_run_has():
    """docs/worse_than_data_parallel.md: 0.3 to 0.5, and falling; 0.966 where the outer rate was too
    high, -0.04 with other texts, an update of 0.63 with a long period."""
    usual = verdict.replicas(exchanged())
    assert usual == "The replicas agree as usual (cosine 0.40, drift 0.01 and not rising)."
    assert verdict.replicas(exchanged(cosine=0.966)).startswith("All replicas pull theta back")
    assert "do they read the same text?" in verdict.replicas(exchanged(cosine=-0.04))
    assert verdict.replicas(exchanged(update=0.634)).startswith("Theta moves by 0.63 of its norm")
    assert verdict.replicas(exchanged(drift=(0.001, 0.1))).startswith("The replicas part (")
    assert verdict.replicas(run_of()) == ""


def test_each_sentence_is_a_link_to_the_panel_that_shows_it():
    """Ids are made by the page's script, by one rule with anchor()."""
    runs = [exchanged()]
    page = html.page(runs, DEFAULTS)
    (script,) = re.findall(r"this\.box\.id = (.*);", page)
    assert script == 'panel.title.toLowerCase().replace(/[^a-z]+/g, "-")'
    links = dict(re.findall(r'<a href="#([a-z-]+)">([^<]*)</a>', page))
    assert links["loss"].startswith("Healthy: ")
    assert links["cosine-of-outer-gradients"].startswith("The replicas agree as usual")
    panels = html.panels(runs, html.tables_of(runs))
    assert links.keys() <= {html.anchor(panel["title"]) for panel in panels}


def test_a_link_is_said_with_what_a_replica_sends_over_it():
    """2.5 MB a step of 2 s are 10 Mbit/s."""
    columns = {"learning/loss": FALLING, "dcn/waited_s": np.zeros(ROWS)}
    columns |= {"perf/step_time": np.full(ROWS, 2.0), "dcn/bytes_sent": np.full(ROWS, 2.5e6)}
    said = verdict.link(run_of(columns=columns))
    assert said.endswith("waits for exchanges 0.0% of the time, and a replica sends 10 Mbit/s.")
