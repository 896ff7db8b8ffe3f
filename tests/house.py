"""The checkers of tests/test_house.py: each takes source text and returns what it finds wrong.

They read syntax trees and import nothing of the package.
"""

import ast
import fnmatch
import graphlib
import importlib.util
import re

DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
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


def dotted(node):
    """`a.b.c` of a name or attribute, or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return ""


def last_name(node):
    return dotted(node).rpartition(".")[2]


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


# -- imports ------------------------------------------------------------------------------------


def imported(source, module, is_package, known):
    """The names a module imports: of ours as modules in `known`, of others by their top name."""
    package = module if is_package else module.rpartition(".")[0]
    out = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{base}.{alias.name}" for alias in node.names}
            out |= {name if name in known else base for name in names}
    return {name if name in known else name.partition(".")[0] for name in out}


def folder_of(module):
    """`diloco` of maxdiloco.diloco.outer, and the name itself of a module in no folder."""
    return module.removeprefix("maxdiloco.").partition(".")[0]


def floor_of(module, floors, programs):
    """The number of the floor that names the folder of a module; programs stand above all."""
    folder = folder_of(module)
    for number, folders in enumerate(floors):
        if folder in folders.split():
            return number
    if folder not in programs:
        raise LookupError(f"{module} has no floor: name its folder in FLOORS")
    return len(floors)


def upward_imports(graph, floors, programs):
    """Imports of another folder that is on no lower floor. graph: {module: modules it imports}."""
    floor = {module: floor_of(module, floors, programs) for module in graph}
    return [
        f"{module} (floor {floor[module]}) imports {other} (floor {floor[other]})"
        for module, others in sorted(graph.items())
        for other in sorted(others & graph.keys())
        if folder_of(module) != folder_of(other)
        and floor[other] >= floor[module]
        and floor[module] < len(floors)
    ]


def cycle(graph):
    """One import cycle as a list of modules, or []."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def forbidden_imports(graph, pairs):
    """Imports that `pairs` of (patterns, patterns) forbid, such as ("config*", "diloco diloco.*").

    A pattern that starts with ! takes a name out again.
    """

    def matches(name, patterns):
        short = name.removeprefix("maxdiloco.")
        hits = [p for p in patterns.split() if fnmatch.fnmatchcase(short, p.lstrip("!"))]
        return bool(hits) and not any(hit.startswith("!") for hit in hits)

    return [
        f"{module} imports {other}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        for importer, target in pairs
        if matches(module, importer) and matches(other, target)
    ]


# -- size ---------------------------------------------------------------------------------------


def too_long(source, *, file, function, exceptions=()):
    """What is over budget [lines]. exceptions: {function name: its own budget}."""
    count = len(source.splitlines())
    out = [f"{count} lines, {file} allowed"] if count > file else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            allowed = dict(exceptions).get(node.name, function)
            if length > allowed:
                out.append(f"{node.name} has {length} lines, {allowed} allowed")
    return out


# -- habits -------------------------------------------------------------------------------------


def guessing(source):
    """getattr with a default and hasattr: a name that may not be there."""
    return [
        f"line {call.lineno}: {call.func.id}"
        for call in calls(ast.parse(source))
        if isinstance(call.func, ast.Name)
        and (call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) > 2))
    ]


def broad_excepts(source):
    """except without a type, of Exception or of BaseException, and suppress of them."""

    def broad(node):
        if isinstance(node, ast.Tuple):
            return any(broad(entry) for entry in node.elts)
        return last_name(node) in ("Exception", "BaseException")

    tree = ast.parse(source)
    out = [
        f"line {node.lineno}: except"
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and (node.type is None or broad(node.type))
    ]
    return out + [
        f"line {call.lineno}: suppress"
        for call in calls(tree)
        if last_name(call.func) == "suppress" and any(broad(argument) for argument in call.args)
    ]


def unfinished(source):
    """NotImplementedError that is raised, not caught, and bodies that end with `...` or pass."""
    out = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            if "NotImplementedError" in map(last_name, ast.walk(node)):
                out.append(f"line {node.lineno}: NotImplementedError")
        elif isinstance(node, ast.FunctionDef) and ast.unparse(node.body[-1]) in ("pass", "..."):
            out.append(f"line {node.lineno}: {node.name} does nothing")
    return out


TRAINERS = {"DiLoCo", "DataParallel"}


def class_questions(source):
    """Where isinstance, type or match tells the class of a trainer."""
    out = []
    for node in ast.walk(ast.parse(source)):
        asked = []
        if isinstance(node, ast.Call) and last_name(node.func) in ("isinstance", "issubclass"):
            asked = ast.walk(node.args[1])
        elif isinstance(node, ast.Compare):
            asked = ast.walk(node) if "type" in {last_name(c.func) for c in calls(node)} else ()
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        out += [f"line {node.lineno}: {last_name(a)}" for a in asked if last_name(a) in TRAINERS]
    return out


def mode_questions(source):
    """Where enable_diloco is read or written: as an attribute, or by its name in quotes."""
    return [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr == "enable_diloco")
        or (isinstance(node, ast.Constant) and node.value == "enable_diloco")
    ]


def _is_main_guard(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
        "__name__ == '__main__'",
        # In the package's own file: whoever runs a program by the wrong Python gets a line of ours
        # before the program's imports end in a traceback.
        "sys.argv[:1] == ['-m'] or sys.version_info < (3, 11)",
    )


def work_at_import(source):
    """Statements at module level, or in a class body, that are neither definition nor constant."""
    out = []

    def makes_constant(call):
        name = last_name(call.func)
        value_class = re.match(r"_?[A-Z][A-Za-z0-9]*[a-z]", name) and name not in STATEFUL
        return name in CONSTANT_MAKERS or value_class

    def declares(value):
        if isinstance(value, ast.Call):
            return last_name(value.func) in DECLARATIONS
        return isinstance(value, ast.Constant)

    def look(body):
        for node in body:
            if isinstance(node, ast.ClassDef):
                # A class body may hold fields: dataclasses.field and the like.
                look([n for n in node.body if not isinstance(n, ast.Assign | ast.AnnAssign)])
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                inner = {c for f in ast.walk(node) if isinstance(f, ast.Lambda) for c in calls(f)}
                for call in set(calls(node)) - inner:
                    if not makes_constant(call):
                        out.append(f"line {node.lineno}: calls {dotted(call.func)} at import")
            elif not (
                isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Pass)
                or (isinstance(node, ast.Expr) and declares(node.value))
                or _is_main_guard(node)
            ):
                out.append(f"line {node.lineno}: {type(node).__name__} at import")

    look(ast.parse(source).body)
    return out


def module_state(source):
    """Module names that change: `global`, caches, and tables that something writes to."""
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
        if isinstance(node, ast.Global):
            out.append(f"line {node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                if last_name(call) in ("cache", "lru_cache"):
                    out.append(f"line {node.lineno}: {node.name} keeps a cache in the module")
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


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _facts(definition):
    """(whether a definition checks something itself, the names in its body), without what runs in
    functions and classes inside it; of a class its methods are names."""
    is_class = isinstance(definition, ast.ClassDef)
    names = {m.name for m in definition.body if isinstance(m, DEFINITIONS)} if is_class else set()
    checks, waiting = False, list(ast.iter_child_nodes(definition))
    while waiting:
        node = waiting.pop()
        if isinstance(node, DEFINITIONS):
            continue
        waiting += ast.iter_child_nodes(node)
        name = last_name(node.func if isinstance(node, ast.Call) else node)
        names.add(name)
        says_so = name in ("raises", "warns", "fail") or name.lstrip("_").startswith("assert")
        checks |= isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and says_so)
    return checks, names


def toothless(source):
    """Test functions that check nothing: no assert, no pytest.raises, no assert_... call, and no
    use of a function or class of the same file that checks."""
    tree = ast.parse(source)
    facts = {node: _facts(node) for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
    scopes = [tree, *(node for node in facts if isinstance(node, ast.ClassDef))]
    outer = {node for scope in scopes for node in scope.body if node in facts}

    def bites(test):
        known = outer | {node for node in ast.walk(test) if node in facts}
        biting, before = {node.name for node in known if facts[node][0]}, set()
        while biting != before:
            before = set(biting)
            biting |= {node.name for node in known if facts[node][1] & before}
        return test.name in biting

    return [
        f"line {node.lineno}: {node.name}"
        for node in facts
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not bites(node)
    ]


def forbidden_words(text, words):
    """Lines of text with a word of `words`, {regular expression: why}."""
    return [
        f"line {n}: {why}: {line.strip()[:80]}"
        for n, line in enumerate(text.splitlines(), 1)
        for pattern, why in words.items()
        if re.search(pattern, line)
    ]
