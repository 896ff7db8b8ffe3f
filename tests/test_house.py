"""The rules of the house that a machine can read off the source, and that no tool has. To change
one, change it here and say why in the commit. Which folder may import which, and what ruff finds,
is in pyproject.toml; scripts/check.sh runs all of it.
"""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# diloco/ knows numbers and pytrees: no file, clock, thread, device or configuration.
DILOCO_LIBRARIES = {
    "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "itertools", "jax",
    "math", "maxdiloco", "ml_dtypes", "numbers", "numpy", "operator", "optax", "statistics",
    "types", "typing",
}  # fmt: skip

BUDGETS = {"file": 350, "function": 60}  # lines; ruff has their length
LONGER = {"train": 120}  # a run, paragraph by paragraph

DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What does nothing when a module is imported.
QUIET = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.Pass)
MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
    "setdefault", "sort", "update",
}  # fmt: skip
# Calls that make a constant. Any other call at module level is work at import.
CONSTANT_MAKERS = {
    "MappingProxyType", "NewType", "NamedTuple", "TypeVar", "compile", "dtype", "finfo",
    "fromkeys", "frozenset", "iinfo", "jit", "namedtuple", "partial", "range", "tuple",
}  # fmt: skip
# Statements that complete a definition.
DECLARATIONS = {"defvjp", "defjvp", "register_dataclass", "register_pytree_node"}
# Capitalised like a value, but they change or run.
STATEFUL = {
    "Barrier", "Condition", "Counter", "Event", "Lock", "OrderedDict", "Pool", "Popen", "Queue",
    "RLock", "Semaphore", "Thread", "ThreadPoolExecutor", "ProcessPoolExecutor",
}  # fmt: skip
GUARDS = (
    "TYPE_CHECKING",
    "__name__ == '__main__'",
    # In the package's own file: whoever runs a program by the wrong Python gets a line of ours
    # before the program's imports end in a traceback.
    "sys.argv[:1] == ['-m'] or sys.version_info < (3, 11)",
)

# What this text speaks of is the project alone.
WORDS = {
    r"/wor[k]/": "a path of one machine",
    r"\.\./shared": "a path of one machine",
    r"/tmp/venv": "a path of one machine",
    r"(?i)\bissue #?\d{1,3}\b": "a number without its tracker",
    r"\b(DESIGN|STYLE|PAPERS|PEERS|KEYS|TPU_OVERLAP)\.md\b": "a page the project does not have",
    r"(?i)pypi\.org|pythonhosted|index-url|artifactory": "a package registry",
    r"(?m)^(<{7}|>{7}) ": "a merge that was not finished",
}
TRAINER = r"[^:]*?\b(DiLoCo|DataParallel)\b"
ASKED = "a difference between the trainers is a method of engine.trainer.Trainer"
CODE_WORDS = {
    r"(?i)(?<![a-z])deltas?(?![a-z])": "an outer gradient, or say what is subtracted from what",
    r"(?i)\bworkers? of diloco\b": "replica",
    r"\b(get|has)attr\(": "a name that may not be there",
    # Ruff finds those that do not raise again.
    r"(?m)^ *except\b[^:]*\b(Base)?Exception\b": "say which errors",
    r"\bsuppress\([^)]*\b(Base)?Exception\b": "say which errors",
    r"\braise NotImplementedError\b|(?m:(^|: ) *(\.\.\.|pass)$)": "a stub",
    r"\bis(instance|subclass)\([^,]*,[^)]*?\b(DiLoCo|DataParallel)\b": ASKED,
    rf"\btype\([^)]*\) (is|==|!=|in|not in) {TRAINER}|\bcase {TRAINER}\(": ASKED,
}
MODE_QUESTION = re.compile(r"\.enable_diloco\b|(['\"])enable_diloco\1")
# The checks of the flags, what chooses the trainer, and what draws the schedule of a stored run.
CHOOSERS = "flags/checks flags/config trainer/assemble page/timeline".split()


def files(*folders, suffixes=(".py",)):
    """Paths of the project's text under some of its folders, relative to the root."""
    return [
        path.relative_to(ROOT)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and path.is_file() and ".egg-info" not in str(path)
    ]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def last_name(node):
    """`c` of the name or attribute a.b.c, or ""."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# -- checkers: each takes source text and returns what it finds wrong ------------------------------


def forbidden_words(text, words):
    """Places in a text where a word of `words`, {regular expression: why}, begins."""
    return [
        f"line {text.count(chr(10), 0, found.start()) + 1}: {why}: {found[0][:80]}"
        for pattern, why in words.items()
        for found in re.finditer(pattern, text)
    ]


def too_long(source):
    """What is over budget."""
    count = len(source.splitlines())
    out = [f"{count} lines"] if count > BUDGETS["file"] else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > LONGER.get(node.name, BUDGETS["function"]):
                out.append(f"{node.name} has {length} lines")
    return out


def work_at_import(source):
    """Statements at module level, or in a class body, that are neither definition nor constant."""
    out = []

    def makes_constant(call):
        name = last_name(call.func)
        value_class = re.match(r"_?[A-Z][A-Za-z0-9]*[a-z]", name) and name not in STATEFUL
        return name in CONSTANT_MAKERS or value_class

    def completes(node):
        if isinstance(node, ast.If):
            return ast.unparse(node.test) in GUARDS
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return last_name(node.value.func) in DECLARATIONS
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

    def look(body):
        for node in body:
            if isinstance(node, ast.ClassDef):
                # A class body may hold fields: dataclasses.field and the like.
                look([n for n in node.body if not isinstance(n, ast.Assign | ast.AnnAssign)])
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                lambdas = [part for part in ast.walk(node) if isinstance(part, ast.Lambda)]
                for call in set(ast.walk(node)).difference(*map(ast.walk, lambdas)):
                    if isinstance(call, ast.Call) and not makes_constant(call):
                        out.append(f"line {node.lineno}: calls {ast.unparse(call.func)} at import")
            elif not completes(node) and not isinstance(node, QUIET):
                out.append(f"line {node.lineno}: {type(node).__name__} at import")

    look(ast.parse(source).body)
    return out


def module_state(source):
    """Tables of a module that something writes to, or whose name does not say that they stay."""
    tree = ast.parse(source)
    tables = {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, DISPLAYS)
        for name in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(name, ast.Name) and name.id != "__all__"
    }
    out = [f"{name} is a table with a small name" for name in sorted(tables) if not name.isupper()]
    for node in ast.walk(tree):
        written = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written = node.value
        elif isinstance(node, ast.AugAssign):
            written = node.target
        elif isinstance(node, ast.Call) and last_name(node.func) in MUTATORS:
            written = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(written, ast.Name) and written.id in tables:
            out.append(f"line {node.lineno}: writes to {written.id}")
    return out


def toothless(source):
    """Test functions that check nothing: no assert, no pytest.raises, no assert_... call, and no
    use of a function or class of the same file that checks."""
    own = {}  # {name: text of a definition without those in it; of a class, its methods' names}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS):
            inner = [part for part in node.body if isinstance(part, DEFINITIONS)]
            parts = [*node.decorator_list, *(part for part in node.body if part not in inner)]
            methods = [part.name for part in inner if isinstance(node, ast.ClassDef)]
            own[node.name] = " ".join([own.get(node.name, ""), *map(ast.unparse, parts), *methods])
    pattern = r"\bassert\b|\b_*assert\w*\(|\b(raises|warns|fail)\("
    biting, before = set(), None
    while biting != before:
        before = biting
        biting = {name for name, text in own.items() if re.search(pattern, text)}
        pattern = r"\b(" + "|".join(biting) + rf")\b|{pattern}"
    return [f"{name}" for name in own if name.startswith("test_") and name not in biting]


# -- rules ----------------------------------------------------------------------------------------

ORDINARY = (
    '"""Words."""\nimport re\nfrom typing import TYPE_CHECKING\n\n'
    "if TYPE_CHECKING:\n    import a\n\n"
    'NAMES = ("a", "b")\nTABLE = {"a": 1}\nPATTERN = re.compile("a")\nRULE = Rule(3)\n'
    '__all__ = ["f"]\nfrom datetime import timedelta\n\n'
    "f.defvjp(forward, backward)\n\n"
    "@dataclasses.dataclass(frozen=True)\nclass A:\n    b: int = field(default=1)\n\n"
    "def f(x):\n    seen = {}\n    seen[x] = NAMES[0]\n"
    "    try:\n        return TABLE[x]\n    except KeyError as e:\n        raise A(1) from e\n"
    "    return isinstance(x, Cycled) or DiLoCo(step)\n"
)
TEST = "def test_a():\n    {}\n".format
EVERYWHERE = ("maxdiloco", "tests", "scripts", "benchmarks")
# (checker, folders, sources that break its rule, sources that keep it)
RULES = (
    (too_long, EVERYWHERE, ["x = 1\n" * 351, "def f():\n" + "    x = 1\n" * 60],
     ["x = 1\n" * 350, "def f():\n" + "    x = 1\n" * 59, "def train():\n" + "    x = 1\n" * 119]),
    (work_at_import, ["maxdiloco"],
     ["x = jnp.zeros(3)", "print(1)", "for i in range(3):\n    x = i",
      "try:\n    import a\nexcept ImportError:\n    a = None", "lock = threading.Lock()",
      "with open(p) as f:\n    pass", "class A:\n    print(1)"], [ORDINARY]),
    (module_state, ["maxdiloco"],
     ["seen = []", "SEEN = {}\ndef f(x):\n    SEEN[x] = 1",
      "SEEN = []\ndef f(x):\n    SEEN.append(x)"], [ORDINARY]),
    (functools.partial(forbidden_words, words=CODE_WORDS), ["maxdiloco"],
     ["delta = a - b", "outer_delta = 1", "# the deltas", "Delta_p = 2", "# a worker of DiLoCo",
      "try:\n    f()\nexcept (OSError, Exception) as e:\n    g()\n    raise",
      "try:\n    f()\nexcept BaseException:\n    raise", "with suppress(Exception):\n    f()",
      'hasattr(x, "a")', 'getattr(x, "a", None)', "raise NotImplementedError('later')",
      "def f():\n    ...", "def f(): pass",
      "isinstance(run.trainer, DiLoCo)", "isinstance(trainer, (int, data_parallel.DataParallel))",
      "isinstance(x, int | DiLoCo)", "if type(trainer) is DiLoCo:\n    f()",
      "match trainer:\n    case DiLoCo():\n        f()"],
     [ORDINARY]),
    (toothless, ["tests"],
     [*map(TEST, ["f()", "x = 1", "def inner():\n        assert f()",
                  "helper()\n\ndef helper():\n    helper()",
                  "class A:\n        def b(self):\n            assert f()"])],
     [*map(TEST, ["assert f()", "with pytest.raises(ValueError):\n        f()",
                  "np.testing.assert_array_equal(a, b)",
                  "helper()\n\ndef helper():\n    assert f()",
                  "def inner():\n        assert f()\n    inner()",
                  "def inner():\n        assert f()\n    apply(inner)",
                  "class A:\n        def b(self):\n            assert f()\n    A().b()"])]),
)  # fmt: skip


@pytest.mark.parametrize(("checker", "folders", "breaches", "fine"), RULES)
def test_the_rule_is_kept_and_a_breach_is_found(checker, folders, breaches, fine):
    found = [f"{path}: {wrong}" for path in files(*folders) for wrong in checker(read(path))]
    assert not found, "\n" + "\n".join(found)
    for source in breaches:
        assert len(checker(source)) == 1, source
    assert [checker(source) for source in fine] == [[]] * len(fine)


def test_diloco_knows_numbers_and_pytrees_only():
    texts = [read(path) for path in files("maxdiloco/diloco")]
    used = {name for text in texts for name in re.findall(r"(?m)^ *(?:import|from) (\w+)", text)}
    assert {"jax", "maxdiloco"} <= used <= DILOCO_LIBRARIES


def test_the_trainer_is_chosen_in_one_place():
    found = {path.as_posix() for path in files("maxdiloco") if MODE_QUESTION.search(read(path))}
    assert found == {f"maxdiloco/{name}.py" for name in CHOOSERS}
    for source in ("if cfg.enable_diloco: f()", 'x = vars(cfg)["enable_diloco"]'):
        assert MODE_QUESTION.search(source)
    assert not MODE_QUESTION.search('say("enable_diloco=false: no fragments")')


def test_the_config_stops_at_the_rooms_that_run_it():
    """Those below take the values that they use. The limit only falls."""
    assert sum(bool(re.search(r"\bcfg\b", read(path))) for path in files("maxdiloco")) <= 40


def test_the_text_speaks_of_the_project_alone():
    """Every text of the project but this file, which spells the words out."""
    suffixes = (".py", ".sh", ".yml", ".md", ".txt", ".toml")
    paths = files("configs", "docs", *EVERYWHERE, suffixes=suffixes)
    top = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", ".gitignore", ".ci/run")
    top += ("setup.py", "pyproject.toml", "constraints.txt")
    paths += map(pathlib.Path, top)
    assert len(paths) > 400
    for path in set(paths) - {pathlib.Path("tests/test_house.py")}:
        assert forbidden_words(read(path), WORDS) == [], path
    foreign = ("/wo" + "rk/main", "see ../shared", "Fixes issue #3", "DESIGN.md 2", "--index-url x")
    foreign += ("<" * 7 + " HEAD",)
    assert [len(forbidden_words(line, WORDS)) for line in foreign] == [1] * 6


def test_configs_and_scripts_stay_readable():
    """A key is a promise: no more than there are, 40 of them of families and experts."""
    for path in files("scripts", "configs", suffixes=(".sh", ".yml", ".yaml", ".env")):
        assert [line for line in read(path).splitlines() if len(line) > 100] == [], path
    keys = re.findall(r"(?m)^\w+:", read("configs/base.yml"))
    assert 50 < len(keys) <= 157, "remove one, or raise the number and say why in the commit"
