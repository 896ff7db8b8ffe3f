"""The page while a run writes: served to this machine alone, and its sentences in a terminal."""

import http.client
import re
import threading

import numpy as np
import pytest
import synthetic_runs
from synthetic_runs import DEFAULTS, FALLING, ROWS, run_of

from maxdiloco import report
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.page import html, live, verdict


@pytest.fixture
def served():
    """A function that serves make() and returns (port, get(path, host))."""
    servers = []

    def serve(make):
        server = live.server(make, port=0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.server_address[0] == "127.0.0.1"

        def get(path="/", host="127.0.0.1"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
            connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        return server.server_port, get

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_look_at_the_served_page_has_the_rows_that_were_written_since(tmp_path, served):
    """It reads itself again until the run has ended; what cannot be read is a line, and the next
    look tries again."""
    history = [synthetic_runs.start(0, until=200)]
    folder = synthetic_runs.write(tmp_path / "a", steps=20, history=history)
    options, named = report.read_options([str(folder)], report.OPTIONS, "report", names=True)
    _, get = served(report.page_of(named, options))
    assert (found := get())[0] == 200
    assert "Step 20 of 200" in found[1] and 'http-equiv="refresh" content="5"' in found[1]
    synthetic_runs.append(folder / "metrics.jsonl", synthetic_runs.row(21, replicas=2))
    assert "Step 21 of 200" in get()[1]
    (folder / "metrics.jsonl").rename(tmp_path / "gone")
    status, line = get()
    assert status == 503 and line.startswith("DataError: ") and "holds no metrics.jsonl" in line
    (tmp_path / "gone").rename(folder / "metrics.jsonl")
    synthetic_runs.append(folder / "history.jsonl", synthetic_runs.end())
    assert "refresh" not in get()[1]


def test_nothing_but_the_page_is_served_and_to_no_page_of_another_name(served):
    port, get = served(lambda: "the page")
    assert get() == (200, "the page") == get(host="localhost")
    assert get("/metrics.jsonl")[0] == get(host="example.org")[0] == 404
    with pytest.raises(ConfigError, match=rf"port={port} cannot be listened on: .*Use port=0"):
        live.server(lambda: "", port=port)


def test_live_refuses_what_cannot_be_read_before_it_listens(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(live, "server", None)  # nothing may listen
    assert report.main([str(tmp_path / "empty"), "--live"]) == DataError.exit_code
    assert "holds no metrics.jsonl" in capsys.readouterr().err


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
