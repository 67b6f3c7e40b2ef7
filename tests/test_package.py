"""The package as installed: what it imports, ships and names."""

import ast
import importlib
import importlib.metadata
import inspect
import io
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib

import pytest

import optax_dls as dls

ROOT = pathlib.Path(__file__).parents[1]


def test_import_brings_in_jax_and_optax_alone():
    unwanted = {"flax", "chex", "matplotlib", "sklearn", "rich", "hypothesis"}
    # Optax itself imported chex before 0.2.7; then it is not our doing.
    script = (
        "import sys, optax; before = set(sys.modules); import optax_dls; "
        "new = set(sys.modules) - before; "
        "print(*new, *{name.partition('.')[0] for name in new})"
    )
    new = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "optax_dls" in new
    assert not unwanted & set(new)
    # Parts of JAX that take longer to import than all of this, for a few functions.
    assert not {"jax.extend.core", "jax.scipy.special"} & set(new)


def test_version_and_typing_marker_are_there():
    assert dls.__version__ == importlib.metadata.version("optax-dls")
    assert f"## [{dls.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (pathlib.Path(dls.__file__).parent / "py.typed").exists()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [*PROJECT["dependencies"]]
for extra in PROJECT["optional-dependencies"].values():
    REQUIREMENTS += extra


def test_the_core_needs_jax_jaxlib_and_optax():
    names = [
        re.split("[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]
    ]
    assert names == ["jax", "jaxlib", "optax"]
    assert set(PROJECT["optional-dependencies"]) >= {
        "flax",
        "demo",
        "plot",
        "test",
        "dev",
    }
    assert not any("<" in requirement for requirement in REQUIREMENTS)


def test_the_lower_bounds_are_the_versions_that_are_tested():
    tools = (
        "import-linter",
        "mypy",
        "ruff",
    )  # they look at the code, it does not run on them
    bounds = {
        requirement.replace(">=", "==")
        for requirement in REQUIREMENTS
        if ">=" in requirement and not requirement.startswith(tools)
    }
    pinned = (ROOT / ".ci" / "lower-bounds.txt").read_text().splitlines()
    assert {line for line in pinned if not line.startswith("#")} == bounds


@pytest.mark.parametrize("name", sorted(set(dls.__all__) - {"rules"}))
def test_every_public_name_says_what_it_is_with_an_example(name):
    member = getattr(dls, name)
    doc = inspect.getdoc(member)
    assert doc.splitlines()[0].endswith((".", "`."))
    if inspect.isfunction(member):
        assert ">>> " in doc
        for section in ("Args:", "Example:"):
            assert section in doc


def test_all_names_everything_public():
    public = {name for name in vars(dls) if not name.startswith("_")}
    assert public - {"debugging", "demo", "plot"} == set(dls.__all__)


@pytest.mark.parametrize("name", ["rules", "debugging", "interop", "profiles"])
def test_a_public_module_names_exactly_what_is_for_users(name):
    module = importlib.import_module(f"optax_dls.{name}")
    public = {key for key in vars(module) if not key.startswith("_")}
    if name == "interop":  # one file, which imports what it needs
        public &= set(module.__all__)
    assert public == set(module.__all__)


def code_lines(source):
    """The numbers of the lines that hold code, not comments or nothing."""
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        line
        for token in tokens
        if token.type not in layout
        for line in range(token.start[0], token.end[0] + 1)
    }


def own_lines(function, lines):
    """Those of a function: its docstring and its closures count by themselves."""

    def span(node):
        return set(range(node.lineno, node.end_lineno + 1))

    own = span(function) & lines
    if ast.get_docstring(function):
        own -= span(function.body[0])
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            own -= span(node)
    return own


def test_a_function_is_read_on_one_screen_and_a_file_in_a_few():
    files = sorted(pathlib.Path(dls.__file__).parent.rglob("*.py"))
    assert len(files) > 40
    for path in files:
        source = path.read_text()
        assert source.count("\n") <= 300, path
        lines = code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert len(own_lines(node, lines)) <= 60, (path, node.name)
