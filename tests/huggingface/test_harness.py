"""lm_eval gives a run the results that its own model `hf` gives to the export of the run."""

import json
import sys

import jax
import pytest
from run import FEW_OPTIMIZATIONS, KEYS, Process, names_key, output_of, refused, train

from maxdiloco import evaluate, hf
from maxdiloco import tokenizer as tokenizer_program

pytestmark = pytest.mark.torch_import

LENGTH = 48
# Floating-point errors of sums of at most 200 float32 log-probabilities, each about 1e-6.
TOLERANCE = 1e-4
WORDS = "the cat sat on a mat and why not by seven old dogs".split()


@pytest.fixture(scope="module", autouse=True)
def quick_and_quiet():
    """No value needs the compiler's optimizations. The first reader of a task's data would print a
    progress bar among the errors."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run on two emulated slices, its export, and a task on its text."""
    folder = tmp_path_factory.mktemp("harness")
    lines = [f"the cat number {i} sat on mat {i * 7 % 13}, and why not?\n" for i in range(400)]
    (folder / "text.txt").write_text("".join(lines))
    output_of(
        tokenizer_program.main, folder / "text.txt", f"out={folder / 'tok.json'}", "vocab_size=300"
    )
    keys = KEYS | dict(
        dataset_type="text",
        dataset_path=folder / "text.txt",
        vocab_size="auto",
        tokenizer_type="huggingface",
        tokenizer_path=folder / "tok.json",
        max_target_length=LENGTH,
        base_num_kv_heads=1,
        steps=30,
        learning_rate=3e-2,
        log_period=10,
        checkpoint_period=30,
    )
    assert train(folder / "run", **keys).code == 0
    output_of(hf.main, "export", folder / "run", folder / "export")
    rows = [
        {"question": f"the cat number {i} sat", "choices": [" on mat", " of the", "?"], "gold": k}
        for i, k in zip(range(60), [0, 0, 1] * 20, strict=True)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = dict(
        task="mats",
        dataset_path="json",
        dataset_kwargs={"data_files": {"test": str(folder / "rows.jsonl")}},
        output_type="multiple_choice",
        test_split="test",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    (folder / "mats.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def models(trained):
    """A pair: the harness's models of the run and of its export."""
    pytest.importorskip("lm_eval")
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # several threads wait for each other while another worker runs
    from lm_eval.api import registry
    from lm_eval.models.huggingface import HFLM

    from maxdiloco.huggingface.harness import HarnessModel

    assert registry.get_model("maxdiloco") is HarnessModel
    # Without its cache of logits, which reads wrong positions if two requests divide one text into
    # context and continuation at different places.
    theirs = HFLM(
        pretrained=str(trained / "export"),
        dtype="float32",
        device="cpu",
        batch_size=1,
        logits_cache=False,
    )
    assert theirs.max_length == LENGTH
    return HarnessModel(str(trained / "run"), batch_size=3), theirs


def requests(kind, *arguments):
    """The harness's requests with these arguments."""
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


def test_log_likelihoods_equal_those_of_the_export(models):
    """Contexts of every length: none, short, of another batch, and longer than a sequence."""
    pairs = [(" ".join(WORDS[:size]), " " + " ".join(WORDS[size:])) for size in range(len(WORDS))]
    pairs += [("the cat number 4 sat on ", "mat 2"), ("the cat " * 60, "number 7 sat")]
    asked = requests("loglikelihood", *pairs)
    ours, theirs = (model.loglikelihood(asked, disable_tqdm=True) for model in models)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert len({round(score, 3) for score, _ in ours}) > len(pairs) / 2  # no constant
    for (score, _), (expected, _) in zip(ours, theirs, strict=True):
        assert abs(score - expected) < TOLERANCE


def test_a_likely_continuation_is_greedy(models):
    """So the comparison above has both values."""
    ours, _ = models
    asked = requests("generate_until", ("the cat number 12 sat on mat", {"max_gen_toks": 2}))
    (text,) = ours.generate_until(asked, disable_tqdm=True)
    pairs = (("the cat number 12 sat on mat", text), ("the cat number 12 sat on mat", "?!"))
    found = ours.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False]


def test_rolling_log_likelihoods_equal_those_of_the_export(models):
    """Texts of one window and of several."""
    texts = ["the cat", " ".join(WORDS), "the cat number 5 sat on mat 9. " * 12]
    asked = requests("loglikelihood_rolling", *[(text,) for text in texts])
    ours, theirs = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in models)
    assert len(models[0].tok_encode(texts[2])) > 2 * LENGTH
    for score, expected in zip(ours, theirs, strict=True):
        assert abs(score - expected) < TOLERANCE


def test_generated_text_equals_that_of_the_export(models):
    """Prompts of several lengths, one that is too long, and two stop strings."""
    options = {"max_gen_toks": 20, "until": ["9", "not"]}
    prompts = ["the cat", "the cat number", "the dog number", "the cat sat on mat " * 30, "and"]
    asked = requests("generate_until", *[(prompt, options) for prompt in prompts])
    ours, theirs = (model.generate_until(asked, disable_tqdm=True) for model in models)
    assert ours == theirs
    assert any(ours) and not any("9" in text or "not" in text for text in ours)


@pytest.fixture(scope="module")
def expected(models, trained):
    """The harness's results of the export for the task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    tasks = [str(trained / "mats.yaml")]
    found = lm_eval.simple_evaluate(model=models[1], tasks=tasks, task_manager=manager)
    return found["results"]["mats"]


@pytest.fixture(scope="module")
def one_manager():
    """The harness's tasks are read once: there are thousands."""
    pytest.importorskip("lm_eval")
    from maxdiloco.huggingface import harness

    manager = harness.TaskManager()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "TaskManager", lambda: manager)
        yield


@pytest.mark.usefixtures("one_manager")
def test_evaluate_has_the_accuracies_of_the_export(expected, trained):
    """Within 0.1 point, by the program, on the mesh of the run; a question of 60 is 1.7 points."""
    report = trained / "report.json"
    output_of(evaluate.main, trained / "run", f"tasks={trained / 'mats.yaml'}", f"report={report}")
    ours = json.loads(report.read_text())["tasks"]["mats"]
    for name in ("acc,none", "acc_norm,none"):
        assert 0 < ours[name] < 1 and abs(ours[name] - expected[name]) < 1e-3


def test_the_command_line_of_the_harness_has_the_model(expected, trained):
    """With one device instead of the run's two."""
    command = [sys.executable, "-m", "maxdiloco.huggingface.harness", "--model", "maxdiloco"]
    command += ["--model_args", f"run={trained / 'run'},dcn_diloco_parallelism=1"]
    command += ["--tasks", str(trained / "mats.yaml"), "--output_path", str(trained / "out.json")]
    with Process(command, FEW_OPTIMIZATIONS) as process:
        assert process.wait_for_exit() == 0, process.output
    (path,) = trained.glob("out*.json")
    found = json.loads(path.read_text())["results"]["mats"]
    assert abs(found["acc,none"] - expected["acc,none"]) < 1e-3


@pytest.mark.usefixtures("one_manager")
def test_what_cannot_be_evaluated_is_refused(trained):
    """Each by a line that names the key: 2 is a ConfigError."""
    for name in ("no_such_task", trained / "text.txt"):
        code, line = refused(evaluate.main, trained / "run", f"tasks={name}")
        assert code == 2 and names_key(line, "tasks"), line


def test_keys_are_checked_before_the_tasks_are_loaded(trained, monkeypatch):
    """Here they cannot be loaded: None in sys.modules makes an import fail."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for argument, keys in (
        ("no_such_key=1", ["no_such_key"]),
        ("batch_size=8", ["lm_eval"]),
        ("step=-1", ["tasks", "eval"]),  # the extra
    ):
        code, line = refused(evaluate.main, trained / "run", "tasks=mats", argument)
        assert code == 2 and all(names_key(line, key) for key in keys), line
