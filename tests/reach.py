"""Which test files a change can reach, by the modules that they import: tests/selection.py leaves out the others.

A file of tests reaches each module whose name it contains: in an import at any depth, in a string that a test patches,
or in the code of a child process; then what these modules contain, and the conftest.py of its folders. Two tables hide
names: `fp8serve.Engine` is the module that fp8serve/__init__.py has it in, and of the command line, which imports every
command, a file reaches the commands whose names it quotes. Other commands take helpers from `serve`, but do not serve.

Where it is unknown what a test reads, it always runs: every change reaches the files that make a path from `__file__`,
such as the tests of pages and of source text, and a change of csrc/ or of a file outside of any package reaches all.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

FOLDERS = {
    "fp8serve": "fp8serve", "calibrate": "fp8serve.calibration",
    "tests": "tests", "benchmarks": "benchmarks", "docs": "docs", "examples": "examples",
}  # fmt: skip
"""Folders of modules, and the names of their packages."""
PAGES = ("*.md", "docs/*", ".github/*")  # what is in them is read by path only
COMMAND_LINE, COMMANDS = "fp8serve.cli", "fp8serve.commands"
_FROM = re.compile(r"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|.*)", re.MULTILINE)
_DOTTED = re.compile(rf"\b(?:{'|'.join(sorted({name.split('.')[0] for name in FOLDERS.values()}))})(?:\.\w+)*")
_SIBLING = re.compile(r'__file__\)\.with_name\("(\w+)\.py"\)')
# Not the place of a warning, the directory of a process, or a sibling.
_OWN_PATH = re.compile(r'(?<!== )(?<!cwd=Path\()(?<!chdir\(Path\()\b__file__(?!\)\.with_name\("\w+\.py"\))')
_TABLE = re.compile(r'^ +"(\w+)": "?([\w.]+)"?', re.MULTILINE)
_PROGRAM = re.compile(r'"-m", "fp8serve"|\w\("fp8serve", |-m fp8serve\b(?!\.)')
_COMMAND = re.compile(r'"([a-z]+)": (\w+)(?:\.app)?[,}]')


class Modules:
    """The modules below `root` and the names that each of them contains."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths: dict[str, Path] = {}
        for folder, package in FOLDERS.items():
            for path in (root / folder).rglob("*.py"):
                parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
                self.paths[".".join(parts).removesuffix(".__init__")] = path
        self.names = {path: name for name, path in self.paths.items()}
        self._texts: dict[str, str] = {}
        self._edges: dict[str, set[str]] = {}

    def text(self, module: str) -> str:
        if module not in self._texts:
            self._texts[module] = self.paths[module].read_text()
        return self._texts[module]

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """The module of every public name of the package."""
        return dict(_TABLE.findall(self.text("fp8serve"))) if "fp8serve" in self.paths else {}

    @cached_property
    def commands(self) -> Mapping[str, str]:
        """The module of every command."""
        found = _COMMAND.findall(self.text(COMMAND_LINE)) if COMMAND_LINE in self.paths else []
        return {command: f"{COMMANDS}.{module}" for command, module in found}

    def with_packages(self, name: str) -> set[str]:
        """The module of a dotted name that may go on with attributes, and the packages that it lies in."""
        first, _, attribute = name.partition(".")
        if first == "fp8serve" and attribute.partition(".")[0] in self.attributes and name not in self.paths:
            name = self.attributes[attribute.partition(".")[0]]
        parts = name.split(".")
        return {part for end in range(len(parts)) if (part := ".".join(parts[: end + 1])) in self.paths}

    def edges(self, module: str) -> set[str]:
        """The modules whose names `module` contains."""
        if module not in self._edges:
            text, path = self.text(module), self.paths[module]
            package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
            names = set(_DOTTED.findall(text))
            for base, imported in _FROM.findall(text):
                level = len(base) - len(base.lstrip("."))
                parents = package[: len(package) - level + 1] if level else []
                full = ".".join([*parents, *filter(None, [base.lstrip(".")])])
                names |= {f"{full}.{word}" for word in re.findall(r"\w+", imported)} if _DOTTED.match(full) else set()
            if re.search(r"import fp8serve as|fp8serve import \*", text):
                names |= {*self.attributes.values()}
            names |= {".".join([*package, sibling]) for sibling in _SIBLING.findall(text)}
            if module == "fp8serve":
                names = set()  # `attributes`
            elif module == COMMAND_LINE:
                names = {name for name in names if not name.startswith(COMMANDS)}
            elif module.startswith(COMMANDS):
                names = {name for name in names if not f"{name}.".startswith(f"{COMMANDS}.serve.")}
            elif COMMAND_LINE in text or _PROGRAM.search(text):
                names |= {COMMAND_LINE}
                names |= {name for command, name in self.commands.items() if re.search(rf"[\"' ]{command}\b", text)}
            self._edges[module] = set().union(*map(self.with_packages, names)) if names else set()
        return self._edges[module]

    def reach(self, test: str) -> set[str]:
        """The modules that a module of tests reaches, itself included."""
        parts = test.split(".")
        conftests = {".".join([*parts[:end], "conftest"]) for end in range(2, len(parts))}  # selection.py: EVERYTHING
        seen, waiting = set[str](), {test, *self.with_packages(test), *(conftests & self.paths.keys())}
        while waiting:
            seen |= waiting
            waiting = set().union(*map(self.edges, waiting)) - seen
        return seen

    def reads_paths(self, reached: Iterable[str]) -> bool:
        """Whether a module outside of the package builds a path to files of this checkout."""
        return any(_OWN_PATH.search(self.text(name)) for name in reached if not name.startswith("fp8serve"))

    def changed(self, files: Iterable[str]) -> set[str] | None:
        """The modules that changed, for a file without one its package. None if a file belongs to no package."""
        found = set[str]()
        for file in files:
            path = Path(file)
            if (
                any(path.match(page) or file.startswith(page.removesuffix("*")) for page in PAGES)
                and path.suffix != ".py"
            ):
                continue
            name = self.names.get(self.root / path)
            for folder in path.parents if name is None else ():
                name = name or self.names.get(self.root / folder / "__init__.py")
            if name is None:
                return None
            found.add(name)
        return found

    def unreached(self, tests: Sequence[Path], files: Iterable[str]) -> list[Path]:
        """The files of tests that none of the changed files reaches."""
        changed = self.changed(files)
        if changed is None:
            return []
        found = []
        for path in tests:
            reached = self.reach(self.names[path]) if path in self.names else changed
            if changed.isdisjoint(reached) and not self.reads_paths(reached):
                found.append(path)
        return found
