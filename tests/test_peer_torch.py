"""The benchmark beside a PyTorch loop: its arguments, the turns, the report; without torch."""

import sys
import types

import pytest

from benchmarks import peer_torch
from benchmarks.link.rows import RowError

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
    assert (job["tied"], job["qk_norm"]) == (cfg.logits_via_embedding, cfg.use_qk_norm)
    assert not job["gated"]
    own, _, cfg = peer_torch.arguments(["torch_dtype=float32"])
    assert (cfg.dtype, peer_torch.torch_job(cfg, own)["dtype"]) == ("bfloat16", "float32")
    assert job["spec"]["base_num_decoder_layers"] == 12 and job["batch"] == 4


@pytest.fixture
def torch(tmp_path, monkeypatch):
    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.setattr(peer_torch, "PROCESS", tmp_path / "loop.py")
    found = peer_torch.Torch(sys.executable, {}, tmp_path / "log")
    yield found
    found.close()


def test_a_loop_answers_each_turn_and_its_end_is_an_error_with_its_last_words(torch):
    assert torch.ready["parameters"] == 7
    assert [torch.step()["wall"], torch.step()["wall"]] == [0.5, 1.5]
    with pytest.raises(RowError, match="ended with 1: out of memory"):
        torch.step()


def test_models_of_different_size_are_not_compared():
    peer_torch.check_size(7, 7)
    with pytest.raises(RowError, match="8 parameters here, 7 in torch"):
        peer_torch.check_size(8, 7)


class Ours:
    """A case whose steps take 0.25 s and 0.5 s of CPU time."""

    def __init__(self):
        self.wall, self.cpu = [], []
        self.parts = types.SimpleNamespace(shape=types.SimpleNamespace(tokens=2048))

    def timed_step(self, batch):
        self.wall.append(0.25)
        self.cpu.append(0.5)


def test_the_report_has_the_ratio_of_medians(torch, monkeypatch):
    """torch's steps 0.5 and 1.5 s, ours 0.25: 1.0 / 0.25 = 4; tokens 2048 / 0.25 = 8,192."""
    monkeypatch.setattr(peer_torch.step_time, "make_batch", lambda *_: None)
    monkeypatch.setattr(peer_torch, "peak_share", lambda *_: "0.512")
    cfg = types.SimpleNamespace(steps=2, model_name="m", dtype="float32", hardware="cpu")
    ours = Ours()
    walls, cpus = peer_torch.in_turns(ours, torch, cfg, 0.0)
    assert walls == {"maxdiloco": [0.25, 0.25], "torch": [0.5, 1.5]}
    text = peer_torch.report(cfg, ours, torch.ready, walls, cpus, {"torch": 9.0})
    assert all(words in text for words in ("s 4.000", "time 2.000", "8,192", "0.512", "2, half"))
