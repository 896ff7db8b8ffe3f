"""The benchmark of the Triton kernels: what it compares, here with the kernels interpreted."""

from benchmarks import gpu_kernels
from maxdiloco.models import triton_ragged

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
