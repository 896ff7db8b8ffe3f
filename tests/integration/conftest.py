"""Compiled programs that tests with whole runs share, in their own process and in others."""

import contextlib
import json

import jax
import pytest
from cloud_fixtures import faulty, gcs, no_clients, s3, s3_server  # noqa: F401  fixtures
from jax.experimental.compilation_cache import compilation_cache
from run import run_program, train

from maxdiloco import evaluate, train_compile

SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    # Half the compile time; the same in every run that is compared with another.
    "jax_disable_most_optimizations": True,
}


@contextlib.contextmanager
def shared_programs(tmp_path_factory):
    """Runs in here keep compiled programs in one folder of the session."""
    root = tmp_path_factory.getbasetemp()
    if root.name.startswith("popen-"):  # one of several processes of pytest-xdist
        root = root.parent
    before = {name: jax.config.values[name] for name in [*SETTINGS, "jax_compilation_cache_dir"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("M_JAX_CACHE_DIR", str(root / "programs"))
        patch.setenv("PYTHONUNBUFFERED", "1")
        for name, value in SETTINGS.items():
            patch.setenv(name.upper(), str(int(value)))
            jax.config.update(name, value)
        jax.config.update("jax_compilation_cache_dir", str(root / "programs"))
        compilation_cache.reset_cache()  # JAX asks only once whether there is a folder
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Runs of this module share compiled programs."""
    with shared_programs(tmp_path_factory):
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run that nothing interrupted: 62 steps, with the saves of 40, 60, 62."""
    folder = tmp_path_factory.mktemp("finished")
    with shared_programs(tmp_path_factory):  # pytest makes this before what a module asks for
        assert train(folder / "finished", checkpoint_period=20).code == 0
    return folder / "finished"


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """The folder of a run on text that was evaluated, and its keys."""
    folder = tmp_path_factory.mktemp("text_run")
    (folder / "text.txt").write_text("in the beginning there was a byte, and it was even. " * 60)
    keys = dict(
        dataset_type="text",
        dataset_path=folder / "text.txt",
        vocab_size=257,
        steps=4,
        eval_interval=2,
        eval_steps=2,
        opt_type="sgd",
    )
    with shared_programs(tmp_path_factory):
        assert train(folder / "text", **keys).code == 0
    return folder / "text", keys


@pytest.fixture
def evaluated(tmp_path):
    """The report on an evaluation."""
    report = tmp_path / "report.json"

    def evaluated(*argv):
        assert evaluate.main([*map(str, argv), f"report={report}"]) == 0
        return json.loads(report.read_text())

    return evaluated


@pytest.fixture
def compile_run(request, tmp_path, monkeypatch):
    """Call train_compile with KEYS of the module; return its reports, or None, and its Run."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")  # train_compile adds a flag

    def compile_run(*, small=request.module.KEYS, **keys):
        path = tmp_path / "report.json"
        argv = [f"{key}={value}" for key, value in (small | {"report": path} | keys).items()]
        run = run_program(train_compile.main, *argv)
        return json.loads(path.read_text())["reports"] if path.exists() else None, run

    return compile_run


@pytest.fixture
def started():
    """Processes that a test has started; none outlives it."""
    processes = []
    yield processes
    for process in processes:
        process.kill_session()
