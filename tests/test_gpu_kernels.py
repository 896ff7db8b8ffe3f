"""The benchmark of the Triton kernels: what it compares, here with the kernels interpreted."""

import pytest

from benchmarks import gpu_kernels
from maxdiloco.models import triton, triton_ragged

SMALL = ["interpret=true", "sequences=1", "length=64", "heads=2", "kv_heads=1", "head_dim=16",
         "rows=96", "experts=3", "width=32", "hidden=16", "steps=2"]  # fmt: skip


def test_every_way_is_near_float32_and_has_a_time(capsys):
    assert gpu_kernels.main(SMALL) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["what", "by", "error", "ms"]
    ways = [("attention", "triton"), ("attention", "dot_product"), ("experts", "triton"),
            ("experts", "ragged_dot")]  # fmt: skip
    assert [tuple(line[:2]) for line in lines[1:]] == ways
    assert all(0 < float(line[2]) < 0.01 and float(line[3]) > 0 for line in lines[1:])


def test_a_wrong_kernel_is_exit_code_1(monkeypatch, capsys):
    right = triton_ragged.rows_by_matrices
    monkeypatch.setattr(
        triton_ragged, "rows_by_matrices", lambda *args, **kwargs: 1.1 * right(*args, **kwargs)
    )
    assert gpu_kernels.main(SMALL) == 1
    assert "experts by triton: error 0.1" in capsys.readouterr().err


def test_rows_come_one_by_one_and_cudnn_may_be_missing(monkeypatch, capsys):
    """On a CPU it is; what is printed first is there when the next row fails."""
    attend = triton.attend
    monkeypatch.setattr(
        triton, "attend", lambda softmax_config, _, *arrays: attend(softmax_config, True, *arrays)
    )
    monkeypatch.setattr(gpu_kernels, "experts", lambda own: (1 / 0 for _ in range(1)))
    with pytest.raises(ZeroDivisionError):
        gpu_kernels.main([*SMALL, "interpret=false"])
    said = capsys.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()[1:]] == [
        "triton", "dot_product", "cudnn,"]  # fmt: skip
    assert said.out.splitlines()[-1].split()[-3:] == ["-", "nan", "nan"]
    assert said.err.startswith("cudnn, no documents: ")
