"""The benchmarks beside a PyTorch loop and beside torchft: what they are told, what is checked of
them, and what the tables say. torch runs in environments of the benchmarks, not here.
"""

import sys
import types

import pytest
from thin_link_rows import measured

from benchmarks import peer_torch, peer_torchft
from benchmarks.link.rows import RowError

# -- a PyTorch loop -----------------------------------------------------------------------------

LOOP = """
import json, sys
ready = {"parameters": 7, "torch": "2", "dtype": "half", "threads": 1, "first_step_s": 1.0}
print(json.dumps(ready), flush=True)
for k, _ in enumerate(sys.stdin):
    if k == 2:
        sys.exit("out of memory")
    print(json.dumps({"wall": 0.5 + k, "cpu": 0.25}), flush=True)
"""


def test_torch_is_told_the_model_of_the_trainer():
    own, _, cfg = peer_torch.arguments(["model_name=180m", "hardware=gpu", "threads=3"])
    job = peer_torch.torch_job(cfg, own)
    assert (job["device"], job["threads"], job["dtype"]) == ("cuda", 3, "bfloat16")
    assert (job["tied"], job["qk_norm"]) == (cfg.logits_via_embedding, True)
    assert not job["gated"]
    assert job["spec"]["base_num_decoder_layers"] == 12 and job["batch"] == 4
    own, _, cfg = peer_torch.arguments(["torch_dtype=float32"])
    assert (cfg.dtype, peer_torch.torch_job(cfg, own)["dtype"]) == ("bfloat16", "float32")
    with pytest.raises(RowError, match="8 parameters here, 7 in torch"):
        peer_torch.check_size(8, 7)


def test_the_report_has_the_ratio_of_medians_and_a_loop_that_ends_its_last_words(
    tmp_path, monkeypatch
):
    """torch's steps 0.5 and 1.5 s, ours 0.25: 1.0 / 0.25 = 4; tokens 2048 / 0.25 = 8,192."""
    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.setattr(peer_torch, "PROCESS", tmp_path / "loop.py")
    monkeypatch.setattr(peer_torch.step_time, "make_batch", lambda *_: None)
    monkeypatch.setattr(peer_torch, "peak_share", lambda *_: "0.512")
    cfg = types.SimpleNamespace(steps=2, model_name="m", dtype="float32", hardware="cpu")
    shape = types.SimpleNamespace(tokens=2048)
    ours = types.SimpleNamespace(wall=[], cpu=[], parts=types.SimpleNamespace(shape=shape))
    ours.timed_step = lambda batch: (ours.wall.append(0.25), ours.cpu.append(0.5))
    torch = peer_torch.Torch(sys.executable, {}, tmp_path / "log")
    walls, cpus = peer_torch.in_turns(ours, torch, cfg, 0.0)
    assert walls == {"maxdiloco": [0.25, 0.25], "torch": [0.5, 1.5]}
    text = peer_torch.report(cfg, ours, torch.ready, walls, cpus, {"torch": 9.0})
    assert all(words in text for words in ("s 4.000", "time 2.000", "8,192", "0.512", "2, half"))
    with pytest.raises(RowError, match="ended with 1: out of memory"):
        torch.step()
    torch.close()


# -- torchft ------------------------------------------------------------------------------------


def test_each_trainer_is_compared_with_its_own_plain_step_and_the_payload(tmp_path, capsys):
    """Plain 200 and 100 ms; at 10 Mbit/s 250 and 400. 1,000 bytes of payload a step for both: a
    ring over float32 has the model once a period with M=2, 2 * 3 / 4 of it with M=4."""
    keys, report = {"diloco_sync_period": "20"}, {"parameters": 1000}
    assert peer_torchft.payload(report, {"hosts": 2, "keys": keys}) == 4000 / 20
    assert peer_torchft.payload(report, {"hosts": 4, "keys": keys}) == 6000 / 20
    setup, _, _ = peer_torchft.arguments([])
    plain = dict(wire="", carrier="", rate="unlimited", sent_per_step=[100.0, 100.0])
    theirs = {"trainer": "torchft", "versions": {"torchft": "0.2.0", "torch": "2.13.0"}}
    carried = dict(sent_per_step=[1150.0, 1150.0], claimed_per_step=1000.0)
    both = [
        measured("plain", 198.0, trainer="maxdiloco", **plain),
        measured("plain", 100.0, **theirs, **plain),
        measured("overlapped", 250.0, trainer="maxdiloco", **carried),
        measured("overlapped", 400.0, **theirs, **carried),
        measured("plain", 202.0, trainer="maxdiloco", **plain),
    ]
    peer_torchft.same_model(both)
    assert peer_torchft.report(tmp_path, setup, both) == 0
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "plain step maxdiloco 198.0 and 202.0 ms, torchft 100.0 ms" in lines[0]
    assert "torchft 0.2.0, torch 2.13.0, bucketization off" in lines[0]
    # 200 / 250, 250 - 200; 100 / 400, 400 - 100; (1,150 - 100) / 1,000 bytes.
    assert lines[4] == "| maxdiloco | float32 | 10 | 250.0 | 80.0% | 50.0 | 1.1 | 1.050 | 9.5 |"
    assert lines[5] == "| torchft | float32 | 10 | 400.0 | 25.0% | 300.0 | 1.1 | 1.050 | 9.5 |"
    both[3]["claimed_per_step"] = 2000.0  # (1,150 - 100) / 2,000
    assert peer_torchft.report(tmp_path, setup, both) == 1
    assert "bytes: torchft float32 at 10 Mbit/s: 0.525 of the payload" in capsys.readouterr().out
    both[1]["parameters"] += 64
    with pytest.raises(RowError, match="the models have 1000000 and 1000064 parameters"):
        peer_torchft.same_model(both)
