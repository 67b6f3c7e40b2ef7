"""Every notebook runs from top to bottom in a fresh kernel, and is stored as it ran."""

import os
import pathlib
import re

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


@pytest.mark.filterwarnings("default")  # of Jupyter; the notebook itself is elsewhere
def test_runs_and_what_it_claims_holds(notebook, tmp_path):
    # Where people open it there is one device, unless the notebook itself asks for more.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment)


def test_is_stored_with_what_it_printed_and_drew(notebook):
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr"


def test_installs_nothing_where_the_library_is_and_checks_its_claims(notebook):
    cells = code_cells(notebook)
    installing = [c.source for c in cells if "%pip install" in c.source]
    assert len(installing) == 1
    assert re.search(
        r"try:\n    import optax_dls\nexcept ImportError:\n    %pip install",
        *installing,
    )
    assert re.search(r"^(    )?assert ", cells[-1].source, flags=re.MULTILINE)


def test_holds_no_path_of_a_machine(notebook):
    assert not re.search(r"/(home|root|tmp|work|Users)/", nbformat.writes(notebook))


def test_all_are_found():
    names = {path.stem for path in NOTEBOOKS}
    assert {"quickstart", "flax", "recipes", "devices", "debugging"} <= names
