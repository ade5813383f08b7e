"""The rules of the code base that a machine can keep, each with a test that the rule itself fires.

Every rule is a function from source text to a list of problems. Standard library only: these tests
must run, and mean the same, whatever is or is not installed.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

# Who may import what, besides the standard library. A module is ruled by the entry it lies under.
# Nothing from outside the project is allowed here; a package that needs some gets its own exception.
ALLOWED_IMPORTS: Mapping[str, tuple[str, ...]] = {
    "outrider.errors": (),
    "outrider.frames": (),
    "outrider.kv": ("outrider.errors", "outrider.kv"),
    "outrider.scheduler.pacing": ("outrider.errors", "outrider.kv", "outrider.scheduler.pacing"),
    "outrider.scheduler": ("outrider.errors", "outrider.kv", "outrider.scheduler"),
    # Links carry bytes, and use what carries them: arrays of addresses, sockets and NIXL.
    "outrider.transfer.links": (
        "msgspec",
        "nixl_cu12",
        "nixl_cu13",
        "numpy",
        "outrider.errors",
        "outrider.kv",
        "outrider.transfer",
        "zmq",
    ),
    # So does the process that speaks to a store.
    "outrider.transfer.tiers.store_child": ("mooncake", "outrider.transfer"),
    "outrider.transfer": (
        "msgspec",
        "outrider.errors",
        "outrider.kv",
        "outrider.scheduler",
        "outrider.transfer",
    ),
    "outrider.events.servable": ("outrider.errors", "outrider.kv"),
    "outrider.events": ("msgspec", "outrider.errors", "outrider.events", "outrider.kv", "zmq"),
    "outrider.models.spec": ("outrider.errors", "outrider.kv.checked"),
    "outrider.models.recipes": (
        "outrider.errors",
        "outrider.extensions",
        "outrider.models.recipes",
        "outrider.models.spec",
    ),
    "outrider.extensions": ("outrider.errors",),
    "outrider.speculative.lookup": ("outrider.errors", "outrider.kv.checked", "outrider.speculative.lookup"),
    "outrider.sanitizer": (
        "outrider.errors",
        "outrider.kv",
        "outrider.sanitizer",
        "outrider.scheduler.plan",
        "outrider.transfer",
    ),
    "outrider.tools.sim": (
        "outrider.errors",
        "outrider.events.servable",
        "outrider.kv",
        "outrider.sanitizer",
        "outrider.scheduler",
        "outrider.speculative.lookup",
        "outrider.tools.sim",
        "outrider.transfer",
    ),
}
TORCH_FREE = tuple(ALLOWED_IMPORTS)
# The same for packages that use libraries from outside: only what they take from the project is fixed.
ALLOWED_OWN_IMPORTS: Mapping[str, tuple[str, ...]] = {
    "outrider.backends": (
        "outrider.backends",
        "outrider.errors",
        "outrider.kv",
        "outrider.models.parameters",
        "outrider.models.spec",
        "outrider.models.weight_forms",
    ),
    "outrider.models": (
        "outrider.backends",
        "outrider.errors",
        "outrider.extensions",
        "outrider.kv",
        "outrider.models",
    ),
    # Only the engine's own process knows the engine; everything else of the server is told what it must know.
    "outrider.server.engine_process": (
        "outrider.engine",
        "outrider.errors",
        "outrider.kv.census",
        "outrider.runner.logprobs",
        "outrider.sampling",
        "outrider.server.engine_process",
        "outrider.server.messages",
    ),
    # A proxy shares the HTTP plumbing of a server, and knows no engine.
    "outrider.proxy": (
        "outrider.__version__",
        "outrider.errors",
        "outrider.kv.checked",
        "outrider.proxy",
        "outrider.server.config",
        "outrider.server.front.problems",
        "outrider.server.http",
        "outrider.server.observe.metrics",
    ),
    "outrider.server": (
        "outrider.__version__",
        "outrider.config",
        "outrider.engine.detokenize",
        "outrider.engine.speculation",
        "outrider.errors",
        "outrider.frames",
        "outrider.grammar",
        "outrider.kv.checked",
        "outrider.models.chat",
        "outrider.models.tokenizer",
        "outrider.sampling",
        "outrider.scheduler.pacing.figures",
        "outrider.scheduler.request",
        "outrider.server",
    ),
}
# Backend-specific code stays in its backend: everything else goes through the interface and the registry, which names
# these packages in strings.
PRIVATE_BACKENDS = ("outrider.backends.cpu", "outrider.backends.cuda")
# What must not be loaded, even indirectly, by importing the torch-free core.
HEAVY = ("torch", "triton", "numpy", "typer", "rich")
CORE = (
    "kv",
    "events",
    "scheduler",
    "tools.sim",
    "transfer",
    "sanitizer",
    "speculative.lookup",
    "speculative.registry",
    "models.recipes",
    "proxy.run",
    "server.run",
    "server.text_process.worker",
)

# Here a drafter is known by its footprint only, except in the files that exist to name them.
NAMELESS = tuple(
    f"outrider.{package}"
    for package in ("kv", "scheduler", "engine", "runner", "tools.sim", "transfer", "sanitizer", "speculative")
)
MAY_NAME_DRAFTERS = (
    "outrider.tools.sim.mutation_table",
    "outrider.speculative.checkpoints",
    "outrider.speculative.drafters",
    "outrider.speculative.registry",
)
# "mtp" needs an edge on both sides, or smtplib would match; the others are unmistakable anywhere.
DRAFTER_NAME = re.compile(r"dflash|eagle|(?<![a-z])mtp(?![a-z])|n[-_]?gram|draft[-_]?model")

# Builtin hash() of text differs from process to process, so nothing keyed by it can be shared.
STABLE_HASHES_ONLY = ("outrider.kv",)
UNPICKLERS = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "shelve"})
MARKERS = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
LINES_MAX = 500

# Written so that this file does not contain what it looks for.
MACHINE_TEXT = re.compile(
    r"(?<![\w.~-])/(?:work|root)(?![\w-])"
    r"|\bpypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|deb\.debian\.org|download\.pytorch\.org"
)
PRODUCT_TEXT = ("src", "tests", "docs", "scripts", ".ci", "pyproject.toml", "constraints.txt")


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    def under(self, packages: Iterable[str]) -> str | None:
        """The first of these packages that this module is or lies in."""
        return next((p for p in packages if self.name == p or self.name.startswith(f"{p}.")), None)


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted((SRC / "outrider").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name=name, source=path.read_text(encoding="utf-8"), is_package=is_package))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of every import at any depth; `from a import b` gives a.b.

    Imports for type checkers only count too: the direction is about who knows whom.
    """
    for node in ast.walk(ast.parse(module.source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                if level:
                    parts = module.name.split(".")
                    here = parts[: len(parts) - level + module.is_package]
                    base = ".".join(here + ([base] if base else []))
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield node.lineno, target


def root_of(target: str) -> str:
    return target.partition(".")[0]


# --- the rules: Module -> problems ------------------------------------------------------------------


def packages_above(module: Module) -> tuple[str, ...]:
    """Packages that a module may not import: the command line is on top, then the tools, then the Python API."""
    if module.name in ("outrider", "outrider.__main__") or module.under(["outrider.cli"]):
        return ()
    if module.under(["outrider.tools"]):
        return ("outrider.cli",)
    # A worker of a cluster is a program that uses the Python API.
    if module.under(["outrider.api", "outrider.cluster"]):
        return ("outrider.cli", "outrider.tools")
    return ("outrider.api", "outrider.cli", "outrider.tools")


def import_direction(module: Module) -> list[str]:
    package = module.under(ALLOWED_IMPORTS)
    own = module.under(ALLOWED_OWN_IMPORTS)
    problems = []
    for line, target in imports(module):
        if package is not None:
            imported = Module(name=target, source="")
            ok = root_of(target) in sys.stdlib_module_names or bool(imported.under(ALLOWED_IMPORTS[package]))
        elif own is not None:
            ok = root_of(target) != "outrider" or bool(Module(name=target, source="").under(ALLOWED_OWN_IMPORTS[own]))
        else:
            # Elsewhere only this much is fixed: a package knows nothing of the packages that lie above it.
            above = packages_above(module)
            ok = not Module(name=target, source="").under(above)
        if not ok:
            problems.append(f"{line}: may not import {target}")
    return problems


def backends_private(module: Module) -> list[str]:
    inside = module.under(PRIVATE_BACKENDS)
    return [
        f"{line}: imports {target}, which belongs to another backend"
        for line, target in imports(module)
        if (backend := Module(name=target, source="").under(PRIVATE_BACKENDS)) and backend != inside
    ]


def torch_free(module: Module) -> list[str]:
    if not module.under(TORCH_FREE):
        return []
    return [f"{line}: imports {target}" for line, target in imports(module) if root_of(target) == "torch"]


def _docstring_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where bare string statements are: docstrings, and notes in their manner under attributes."""
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def nameless_drafters(module: Module) -> list[str]:
    if not module.under(NAMELESS) or module.under(MAY_NAME_DRAFTERS):
        return []
    # From 3.12 on an f-string is several tokens, and its text is in the middle ones.
    kinds = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    spans = _docstring_spans(module.source)
    words = [(0, module.name)]
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type in kinds and not any(start <= token.start < end for start, end in spans):
            words.append((token.start[0], token.string))
    problems = []
    for line, word in words:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", word).lower()
        if DRAFTER_NAME.search(snake):
            problems.append(f"{line}: names a drafter: {word[:60]}")
    return problems


def short_file(module: Module) -> list[str]:
    count = len(module.source.splitlines())
    return [f"{count} lines, at most {LINES_MAX}"] if count > LINES_MAX else []


def no_markers(module: Module) -> list[str]:
    lines = enumerate(module.source.splitlines(), start=1)
    return [f"{number}: unfinished: {line.strip()}" for number, line in lines if MARKERS.search(line)]


def no_bare_except(module: Module) -> list[str]:
    return [
        f"{node.lineno}: bare except"
        for node in ast.walk(ast.parse(module.source))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def no_pickle(module: Module) -> list[str]:
    found = [f"{line}: imports {target}" for line, target in imports(module) if root_of(target) in UNPICKLERS]
    for node in ast.walk(ast.parse(module.source)):
        if not isinstance(node, ast.Call):
            continue
        options = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if ast.unparse(node.func) == "torch.load" and options.get("weights_only") != "True":
            found.append(f"{node.lineno}: torch.load without weights_only=True unpickles")
        if options.get("allow_pickle", "False") != "False":
            found.append(f"{node.lineno}: allow_pickle")
    return found


def no_builtin_hash(module: Module) -> list[str]:
    if not module.under(STABLE_HASHES_ONLY):
        return []
    return [
        f"{node.lineno}: builtin hash"
        for node in ast.walk(ast.parse(module.source))
        if isinstance(node, ast.Name) and node.id == "hash" and isinstance(node.ctx, ast.Load)
    ]


def has_docstring(module: Module) -> list[str]:
    private = any(re.match(r"_(?!_)", part) for part in module.name.split("."))
    if private or ast.get_docstring(ast.parse(module.source)):
        return []
    return ["no module docstring"]


RULES: tuple[Callable[[Module], list[str]], ...] = (
    import_direction,
    backends_private,
    torch_free,
    nameless_drafters,
    short_file,
    no_markers,
    no_bare_except,
    no_pickle,
    no_builtin_hash,
    has_docstring,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule: Callable[[Module], list[str]]) -> None:
    problems = [f"{module.name}:{problem}" for module in modules() for problem in rule(module)]
    assert not problems, "\n".join(problems)


BROKEN = (
    (import_direction, "outrider.kv.pages", "import numpy"),
    (import_direction, "outrider.kv.pages", "from outrider.scheduler import queue"),
    (import_direction, "outrider.kv.pages", "from ..scheduler import queue"),
    (import_direction, "outrider.kv.pages", "def f():\n    from outrider import api"),
    (import_direction, "outrider.kv.pages", "import importlib\nimportlib.import_module('outrider.tools.sim')"),
    (import_direction, "outrider.scheduler.queue", "import outrider.speculative.method"),
    (import_direction, "outrider.scheduler.pacing.pacer", "from outrider.scheduler.plan import StepPlan"),
    (import_direction, "outrider.scheduler.pacing.pacer", "import outrider.speculative.lookup"),
    (import_direction, "outrider.transfer.driver", "import outrider.engine.engine"),
    (import_direction, "outrider.transfer.local", "import numpy"),
    (import_direction, "outrider.transfer.links.nixl", "import torch"),
    (import_direction, "outrider.sanitizer.checks", "from outrider.scheduler.queue import Queue"),
    (import_direction, "outrider.tools.sim.world", "from outrider.speculative.drafters import one"),
    (import_direction, "outrider.engine.engine", "import outrider.api.llm"),
    (import_direction, "outrider.engine.engine", "import outrider.cli.main"),
    (import_direction, "outrider.runner.runner", "from outrider.tools.bench import decode"),
    (import_direction, "outrider.tools.bench.decode", "from outrider.cli.main import main"),
    (import_direction, "outrider.models.load", "from outrider.engine.engine import Engine"),
    (import_direction, "outrider.models.recipes.llama", "from outrider.models.weights import base"),
    (import_direction, "outrider.server.front.service", "from outrider.engine.engine import Engine"),
    (import_direction, "outrider.server.engine_process.loop", "from outrider.server.http import app"),
    (import_direction, "outrider.backends.base", "from outrider.models.decoder import Decoder"),
    (import_direction, "outrider.backends.cpu.backend", "from outrider.runner.tables import Tables"),
    (backends_private, "outrider.engine.build", "from outrider.backends.cpu.backend import CPUBackend"),
    (backends_private, "outrider.tools.bench.decode", "def f():\n    from outrider.backends.cuda import draw"),
    (backends_private, "outrider.backends.registry", "import outrider.backends.cpu.backend"),
    (backends_private, "outrider.backends.cuda.backend", "from outrider.backends.cpu.memory import zeros"),
    (torch_free, "outrider.tools.sim.world", "def f():\n    import torch.nn"),
    (torch_free, "outrider.kv.archetypes", "from torch import Tensor"),
    (nameless_drafters, "outrider.kv.pages", "if method == 'eagle3': pass"),
    (nameless_drafters, "outrider.scheduler.queue", "is_mtp = True"),
    (nameless_drafters, "outrider.tools.sim.world", "class NGramDrafter: pass"),
    (nameless_drafters, "outrider.engine.engine", "x = f'{y} n-gram'"),
    (nameless_drafters, "outrider.engine.engine", "x = DraftModel()"),
    (nameless_drafters, "outrider.kv.groups.dflash", ""),
    (short_file, "outrider.any", "x = 1\n" * (LINES_MAX + 1)),
    (no_markers, "outrider.any", "x = 1  # TODO later"),
    (no_bare_except, "outrider.any", "try:\n    f()\nexcept:\n    pass"),
    (no_pickle, "outrider.any", "from pickle import loads"),
    (no_pickle, "outrider.any", "import torch\ntorch.load('model.pt', weights_only=False)"),
    (no_pickle, "outrider.any", "np.load('table.npy', allow_pickle=True)"),
    (no_builtin_hash, "outrider.kv.prefix", "key = hash(tokens)"),
    (no_builtin_hash, "outrider.kv.prefix", "sorted(pages, key=hash)"),
    (has_docstring, "outrider.any", "# only a comment\nx = 1"),
)
FINE = (
    (import_direction, "outrider.kv.pages", "import heapq\nfrom . import ledger\nfrom .ledger import Ledger"),
    (import_direction, "outrider.kv.pages", "from outrider.errors import OutriderError"),
    (import_direction, "outrider.scheduler.plan", "from outrider.scheduler.pacing.pacer import Pace"),
    (import_direction, "outrider.scheduler.pacing.pacer", "from outrider.kv.footprint import KVFootprint"),
    (import_direction, "outrider.sanitizer.checks", "from outrider.scheduler.plan import StepPlan"),
    (import_direction, "outrider.cli.main", "from outrider.cli.sim import sim\nimport typer"),
    (import_direction, "outrider.transfer.messages", "import msgspec"),
    (import_direction, "outrider.transfer.links.nixl", "import numpy, zmq"),
    (import_direction, "outrider.models.load", "import torch\nfrom outrider.models.spec import DecoderSpec"),
    (backends_private, "outrider.backends.registry", "BACKENDS = {'cpu': 'outrider.backends.cpu.backend'}"),
    (backends_private, "outrider.backends.cpu.backend", "from outrider.backends.cpu.memory import zeros"),
    (backends_private, "outrider.engine.build", "from outrider.backends.registry import select_backend"),
    (torch_free, "outrider.speculative.verify", "import torch"),
    (nameless_drafters, "outrider.kv.pages", '"""Why eagle needs one."""\nx = 1  # and mtp\nimport smtplib'),
    (nameless_drafters, "outrider.kv.pages", 'class A:\n    x: int\n    """One for an ngram."""'),
    (nameless_drafters, "outrider.speculative.drafters.eagle", "name = 'eagle'"),
    (no_builtin_hash, "outrider.kv.prefix", "def __hash__(self): return self.hash"),
)


@pytest.mark.parametrize(("rule", "name", "source"), BROKEN)
def test_rule_reports(rule: Callable[[Module], list[str]], name: str, source: str) -> None:
    assert rule(Module(name=name, source=source))


@pytest.mark.parametrize(("rule", "name", "source"), FINE)
def test_rule_accepts(rule: Callable[[Module], list[str]], name: str, source: str) -> None:
    assert rule(Module(name=name, source=source)) == []


def test_relative_imports_in_a_package_resolve_from_the_package() -> None:
    package = Module(name="outrider.kv", source="from . import pages\nfrom .pages import Page", is_package=True)
    assert [target for _, target in imports(package)] == ["outrider.kv.pages", "outrider.kv.pages.Page"]


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_ruled_package_exists(package: str) -> None:
    """A renamed package would otherwise slip out of its rules unseen."""
    assert any(module.under([package]) for module in modules())


def test_every_package_has_an_init() -> None:
    """Without one it imports as a namespace package: an empty folder then passes for a package."""
    names = {module.name for module in modules()}
    assert {name.rpartition(".")[0] for name in names} - {""} <= names


# --- torch stays out when the core is really imported -----------------------------------------------

# Watches for the attempt, not the result: the answer is the same where torch is not installed.
PROBE = """
import sys

class Watch:
    seen = []

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            cls.seen.append(name)

sys.meta_path.insert(0, Watch)
{statements}
print(*Watch.seen)
"""


def heavy_imports_of(statements: str) -> list[str]:
    code = PROBE.format(heavy=HEAVY, statements=statements)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SRC, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("package", CORE)
def test_importing_the_core_loads_nothing_heavy(package: str) -> None:
    assert heavy_imports_of(f"import outrider.{package}") == []


def test_probe_sees_a_guarded_import() -> None:
    assert "torch" in heavy_imports_of("try:\n    import torch\nexcept ImportError:\n    pass")


# --- no dead files ----------------------------------------------------------------------------------


def unreachable(tree: Iterable[Module], entry_points: Iterable[str]) -> list[str]:
    """Modules that no chain of imports from an entry point reaches.

    A string that is a module's full name (`pkg.module` or `pkg.module:attribute`) counts as an
    import: that is how lazy registries name what they load.
    """
    by_name = {module.name: module for module in tree}
    reached: set[str] = set()
    waiting = list(entry_points)
    while waiting:
        parts = waiting.pop().partition(":")[0].split(".")
        # Importing a.b.c runs a and a.b as well; a trailing class or function name matches nothing.
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name in by_name and name not in reached:
                reached.add(name)
                waiting += [target for _, target in imports(by_name[name])]
                waiting += _strings_naming(by_name[name].source, by_name)
    return sorted(by_name.keys() - reached)


def _strings_naming(source: str, names: Iterable[str]) -> list[str]:
    strings = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant))
    return [s for s in strings if isinstance(s, str) and s.partition(":")[0] in names]


def entry_points() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scripts = list(project["scripts"].values())
    run_by_scripts = [
        name
        for path in sorted((ROOT / "scripts").iterdir())
        for name in re.findall(r"python -m (outrider[\w.]*)", path.read_text(encoding="utf-8"))
    ]
    mains = [module.name for module in modules() if module.name.endswith(".__main__")]
    return ["outrider", *scripts, *run_by_scripts, *mains]


def test_no_file_is_dead() -> None:
    assert unreachable(modules(), entry_points()) == []


def test_dead_files_are_found_even_if_they_import_each_other() -> None:
    tree = [
        Module(name="p", source="", is_package=True),
        Module(name="p.main", source="from p.used import f\nLAZY = {'x': 'p.lazy:X'}"),
        Module(name="p.used", source=""),
        Module(name="p.lazy", source=""),
        Module(name="p.dead", source="import p.dead_too"),
        Module(name="p.dead_too", source="import p.dead"),
    ]
    assert unreachable(tree, ["p.main:main"]) == ["p.dead", "p.dead_too"]


# --- nothing about the machine it was written on ----------------------------------------------------


def product_files() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for start in map(ROOT.joinpath, PRODUCT_TEXT):
        for path in sorted(start.rglob("*")) if start.is_dir() else [start]:
            generated = any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
            if path.is_file() and not generated:
                yield path


def test_product_text_names_no_machine() -> None:
    problems = []
    for path in product_files():
        # Undecodable bytes cannot be part of a match, so binary files need no special case.
        text = path.read_bytes().decode("utf-8", errors="replace")
        problems += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_TEXT.finditer(text)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("parts", [("see /", "work/x"), ("'/", "root'"), ("https://pypi", ".org/simple")])
def test_machine_text_is_recognised(parts: tuple[str, str]) -> None:
    assert MACHINE_TEXT.search("".join(parts))


@pytest.mark.parametrize("text", ["the framework/root cause", "src/work/file", "a/rooted", "~/work"])
def test_ordinary_text_is_no_machine_text(text: str) -> None:
    assert not MACHINE_TEXT.search(text)


def test_what_workers_send_each_other_is_never_unpickled() -> None:
    """NIXL's own parser of descriptors unpickles what it is given."""
    for path in sorted((SRC / "outrider" / "transfer").rglob("*.py")):
        found = deserialisers(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found}"


def deserialisers(source: str) -> list[str]:
    """Names of modules and functions that unpickle, wherever they are imported or called."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name.partition(".")[0] for alias in node.names}
            names |= {(getattr(node, "module", None) or "").partition(".")[0]}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return sorted(names & {*UNPICKLERS, "deserialize_descs", "get_serialized_descs", "recv_pyobj", "allow_pickle"})


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import loads", "agent.deserialize_descs(frame)", "socket.recv_pyobj()"]
)
def test_the_rule_about_unpickling_fires(source: str) -> None:
    assert deserialisers(source)
