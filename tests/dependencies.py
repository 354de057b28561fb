"""Finds the test files that a change can affect, by the imports and the strings of the sources.

A Python file depends on these files:

* The modules that it imports, also inside functions, and their packages. A public name of `fp8serve`, which is imported
  on first use, counts as the module that defines it.
* The modules whose dotted names are among its strings, such as the module of a child process. In tests, also names
  within a string, such as code for `python -c`.
* The files and folders that its strings name, relative to its own folder or, outside of the product, to the root. A
  test that names a folder of programs (examples, benchmarks) depends on what these import; one that lists its own
  folder, on all of it.
* In tests: each conftest.py of its folder and of the folders above it, except tests/conftest.py, which concerns all
  tests; and every file, if it lists the root of the repository.

A test that uses the command line depends on the commands that its strings name, or on all if they name none. A slow
test of tests/test_dependencies.py compares the dependencies of some commands and tests with what their processes
import. No import leads to csrc/: CSRC names the tests of its folders. A change of csrc/cpu/ does not run most tests of
models, servers and calibration, since the tests of kernels compare every operation with the reference. FEW_SOURCES
names tests that run only for some of their dependencies. A file that nothing names, such as a page, affects no test.
"""

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("fp8serve/", "calibrate/")
FOLDERS = ("fp8serve", "calibrate", "tests", "benchmarks", "examples", "docs")
DOTTED = re.compile(rf"\b(?:{'|'.join(FOLDERS)})(?:\.\w+)+")
LISTS_ROOT = re.compile(r"\bROOT\.r?glob\(\"\*|\"ls-files\"")
LISTS_OWN_FOLDER = re.compile(r"__file__\)(\.resolve\(\))?\.parent\.(r?glob|iterdir)\(")
PROGRAMS = ("examples/", "benchmarks/")  # folders of programs, which import what they run
EVERY_FILE = "/"
CLI, COMMANDS, RENAMED_COMMANDS = "fp8serve/cli.py", "fp8serve/commands/", {"eval": "evaluate"}
# Modules that a server starts as processes, and the names by which tests start them. The servers of
# tests/server/conftest.py have stubs in their place, so of the product only LAUNCH depends on them.
PROCESSES = {"fp8serve.train.job_process": "TRAINING_COMMAND", "fp8serve.engine.worker": "EngineClient"}
LAUNCH = "fp8serve/server/launch.py"
CPU_TESTS = ("tests/csrc/", "tests/fp8/", "tests/engine/", "tests/train/", "tests/bench", "tests/test_",
             "tests/model/test_four_bit", "tests/calibration/test_rounding", "tests/compatibility/")  # fmt: skip
CSRC = {
    "csrc/cpu/*": CPU_TESTS,
    "csrc/cuda/*": ("tests/cuda/", "tests/benchmarks/", "tests/csrc/test_library"),
    "csrc/*": (*CPU_TESTS, "tests/cuda/"),  # headers of both libraries, and CMakeLists.txt
}

# Tests of data races and kills. Of their dependencies, these decide the outcome; the others give inputs.
KILLS = ("fp8serve/train/*", "fp8serve/model/storage/*", "fp8serve/fp8/fsdp.py", "fp8serve/fp8/distributed.py",
         "fp8serve/ranks.py", "fp8serve/processes.py", "fp8serve/cli.py", "fp8serve/commands/finetune.py",
         "tests/train/*")  # fmt: skip
FEW_SOURCES = {
    "tests/cuda/test_races.py": ("csrc/cuda/*", "csrc/*.h", "tests/cuda/*"),
    "tests/train/test_killed_groups.py": KILLS,
    "tests/train/sharded/test_stops.py": (*KILLS, "tests/fp8/distributed/*"),
}


def affected_tests(changed: Collection[str]) -> set[str]:
    """Returns the test files that a change of the files `changed` can affect. All paths are relative to the root."""
    return Sources(ROOT).affected_tests(changed)


def matches(files: Iterable[str], patterns: Collection[str]) -> bool:
    return any(fnmatch(file, pattern) for file in files for pattern in patterns)


def is_changed(name: str, changed: Collection[str]) -> bool:
    """Whether a dependency is one of the files `changed` or, if it ends in "/", a folder of one of them."""
    if name.endswith("/"):
        return name == EVERY_FILE or any(file.startswith(name) for file in changed)
    return name.removesuffix("()") in changed


class Sources:
    """The Python files of a repository and their dependencies.

    The functions of a command (fp8serve/commands/) have a name of their own, such as "fp8serve/commands/serve.py()":
    the command line imports all these modules, and calls one function.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*.py"))
        }
        self.nodes = {file: relevant_nodes(text) for file, text in self.texts.items()}
        self.modules = {module_name(file): file for file in self.texts}
        self.public_names = {
            key.value: value.value
            for node in self.nodes.get("fp8serve/__init__.py", [])
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
        }
        self.commands = [file for file in self.texts if file.startswith(COMMANDS) and not file.endswith("_options.py")]
        self.entry_points = {*self.commands, *(self.modules[name] for name in PROCESSES if name in self.modules)}
        names = [*self.texts, *(f"{file}()" for file in self.entry_points)]
        self.direct = {name: set(self.direct_dependencies(name)) for name in names}
        self.direct |= {folder: {file for file in self.texts if file.startswith(folder)} for folder in PROGRAMS}
        self.on_cli = self.dependents([CLI])

    def affected_tests(self, changed: Collection[str]) -> set[str]:
        few = {test for test, sources in FEW_SOURCES.items() if not matches(changed, sources)}
        rules = (next((tests for pattern, tests in CSRC.items() if fnmatch(file, pattern)), ()) for file in changed)
        of_csrc = tuple(prefix for prefixes in rules for prefix in prefixes)
        names = set(self.direct).union(*self.direct.values())
        affected = self.dependents(name for name in names if is_changed(name, changed))
        return {test for test in self.tests() if test.startswith(of_csrc) or affected & self.entries(test)} - few

    def tests(self) -> list[str]:
        return [file for file in self.texts if file.startswith("tests/") and "/test_" in file]

    def dependents(self, names: Iterable[str]) -> set[str]:
        """Returns `names` and everything that depends on one of them, directly or not."""
        users = defaultdict(set)
        for user, dependencies in self.direct.items():
            for name in dependencies:
                users[name].add(user)
        return reachable(names, users)

    def entries(self, test: str) -> set[str]:
        """Returns a test file, its conftest.py, and the functions of the commands that it runs: everything that it
        depends on is a dependency of these."""
        result = {test, *self.conftests(test)}
        if result & self.on_cli:
            reached = reachable(result, self.direct)
            callers = {f for f in reached & self.texts.keys() if not f.startswith(PRODUCT) or CLI in self.direct[f]}
            texts = [text for file in callers for text in strings(self.nodes[file])]
            words = {RENAMED_COMMANDS.get(word, word) for text in texts for word in command_words(text)}
            named = [file for file in self.commands if PurePosixPath(file).stem in words]
            reads_pages = any(name.startswith("docs/") for name in reached - self.texts.keys())
            result |= {f"{file}()" for file in (self.commands if reads_pages or not named else named)}
        return result

    def direct_dependencies(self, name: str) -> Iterator[str]:
        file, runs_functions = name.removesuffix("()"), name.endswith("()")
        nodes, is_product = self.nodes[file], file.startswith(PRODUCT)
        if file in self.entry_points and not runs_functions:
            inner = {inner for node in nodes if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
            nodes = [node for node in nodes if node not in inner]
        names = {*imported_names(nodes, file), *named_modules(nodes, is_product)}
        if file == "fp8serve/__init__.py":
            names -= set(self.public_names.values())
        for process, starter in PROCESSES.items():
            if file == LAUNCH or (not is_product and starter in {name.rpartition(".")[2] for name in names}):
                yield f"{self.modules[process]}()"
        for module in {module for dotted in names for module in self.files_of(dotted)}:
            yield module
            if module in self.entry_points and (runs_functions or not is_product):
                yield f"{module}()"
        if not is_product and LISTS_ROOT.search(self.texts[file]):
            yield EVERY_FILE
        if not is_product and LISTS_OWN_FOLDER.search(self.texts[file]):
            yield f"{PurePosixPath(file).parent}/"
        if not is_product and {"-m", "fp8serve"} <= set(strings(nodes)):
            yield "fp8serve/__main__.py"
        for text in strings(nodes):
            yield from self.named_files(text, file)

    def files_of(self, dotted: str) -> Iterator[str]:
        """Yields the files of the longest module that the name starts with, and of its packages."""
        parts = dotted.split(".")
        if parts[0] == "fp8serve" and len(parts) > 1 and parts[1] in self.public_names:
            yield from self.files_of(self.public_names[parts[1]])
        for length in range(1, len(parts) + 1):
            if file := self.modules.get(".".join(parts[:length])):
                yield file

    def conftests(self, test: str) -> Iterator[str]:
        for folder in PurePosixPath(test).parents:
            if (file := f"{folder}/conftest.py") in self.texts and str(folder) != "tests":
                yield file

    def named_files(self, text: str, file: str) -> Iterator[str]:
        """Yields the file or folder that a string in a file names, such as "docs/numerics.md".

        Files of the product name files of their own folder only. A folder of the root whose name is one word counts
        only behind a slash, as in `ROOT / "docs"`, or if the test has `ROOT / name`: "calibrate" is a command, too. In
        the test's own folder, packages do not count: "engine" may be anything.
        """
        if text == "csrc" and file.startswith(("tests/csrc/", "tests/cuda/")):
            return  # CSRC has their dependencies
        if not re.fullmatch(r"/?\w[\w.-]*(/[\w.*-]+)*/?|\.\w[\w./-]*", text):
            return
        is_path, folder = "/" in text.strip("/"), PurePosixPath(file).parent
        text = text.partition("*")[0].strip("/")
        for home in {folder} if file.startswith(PRODUCT) else {PurePosixPath(), folder}:
            path = self.root / home / text
            if path.is_file():
                yield str(home / text)
            elif text and path.is_dir():
                is_data = home == folder and not (path / "__init__.py").exists()
                is_path = is_path or re.search(rf'/ "{re.escape(text)}"|\bROOT / [a-z]', self.texts[file]) is not None
                if is_data or (is_path and home != folder):
                    yield f"{home / text}/"


def module_name(file: str) -> str:
    name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return f"fp8serve.calibration{name.removeprefix('calibrate')}" if file.startswith("calibrate/") else name


def imported_names(nodes: Collection[ast.AST], file: str) -> Iterator[str]:
    """Yields the absolute names that import statements of a file import."""
    package = PurePosixPath(file).parent.as_posix() + "/__init__.py"
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module_name(package).split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            yield from (".".join(filter(None, (base, node.module, alias.name))) for alias in node.names)


def named_modules(nodes: Collection[ast.AST], is_product: bool) -> Iterator[str]:
    """Yields the dotted names in strings of a file, and those of attributes such as `fp8serve.Linear`."""
    for node in nodes:
        names = list[str]()
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in FOLDERS:
            yield ".".join((node.id, *reversed(names)))
    for text in strings(nodes):
        if not is_product:
            yield from DOTTED.findall(text)
        elif DOTTED.fullmatch(text) and text not in PROCESSES:
            yield text


def relevant_nodes(source: str) -> list[ast.AST]:
    """Returns the nodes that name other files, without blocks that only a type checker reads."""
    tree = ast.parse(source)
    unused = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    kinds = ast.Import | ast.ImportFrom | ast.Attribute | ast.Constant | ast.Expr | ast.FunctionDef | ast.Dict
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and node not in unused]


def reachable(names: Iterable[str], edges: Mapping[str, Collection[str]]) -> set[str]:
    result = set(names)
    waiting = list(result)
    while waiting:
        new = set(edges.get(waiting.pop(), ())) - result
        result |= new
        waiting += new
    return result


def command_words(text: str) -> list[str]:
    """Returns the words of a string that may name a command: those after "fp8serve", and the first of an argument or of
    a command line. The first word of a sentence names none."""
    words = text.split()
    is_argument = len(words) <= 2 or any(word.startswith("-") for word in words)
    return re.findall(r"\bfp8serve (\w+)", text) + (words[:1] if is_argument else [])


def strings(nodes: Collection[ast.AST]) -> Iterator[str]:
    """Yields the strings of the nodes without docstrings, and the constant parts of f-strings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


if __name__ == "__main__":  # prints the test files that a change of the given files affects, and recorded seconds
    recorded = ROOT / "tests/durations.json"
    record: dict[str, float] = json.loads(recorded.read_text())["files"] if recorded.exists() else {}
    affected = sorted(affected_tests(sys.argv[1:]), key=lambda file: record.get(file, 0.0))
    for file in affected:
        print(f"{record.get(file, 0.0):8.1f} s  {file}")
    total = sum(record.get(file, 0.0) for file in affected)
    print(f"{total:8.1f} s of {sum(record.values()):.1f} s: {len(affected)} test files")
