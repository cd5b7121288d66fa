"""The notebooks, from top to bottom in a real kernel."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from tests.e2e.jobs import ROOT, lives, within

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_DEADLINE_S = 170


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stores_no_output(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.timeout(500)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_DEADLINE_S, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    if kept := os.environ.get("MONARCH_RL_KEEP_NOTEBOOKS"):
        nbformat.write(notebook, Path(kept) / path.name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for cell in code for output in cell.outputs)
    errors = [output for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    assert errors == []


@pytest.mark.timeout(300)
def test_a_kernel_that_ends_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a restart does: the kernel is killed in the middle of a session."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:1]
    client = NotebookClient(notebook, timeout=CELL_DEADLINE_S, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        client.execute_cell(notebook.cells[0], 0)
        kernel = next(p for p in psutil.Process().children(recursive=True) if "ipykernel_launcher" in " ".join(p.cmdline()))
        children = kernel.children(recursive=True)
        assert len(children) >= 5
        kernel.kill()
        assert within(10, lambda: not any(map(lives, children))), children
