"""The reference pages say what the code does: every metric, every key, and only messages that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from monarch_rl.algorithms.objective import TABLES, Objective
from monarch_rl.config import schema
from monarch_rl.configure import markdown_page
from monarch_rl.trainer_config import ALGORITHMS, TrainerConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
METRIC = re.compile(r"[a-z]+/[a-z][a-z_]*[a-z0-9]")
EVERY_ROW = {"step", "version", "wall_s", "lr", "entropy", "grad_norm"}
"""The metrics without a slash."""


def sources() -> list[Path]:
    return [path for package in ("monarch_rl", "actors") for path in (ROOT / package).rglob("*.py")]


def texts(path: Path) -> Iterator[str]:
    """String constants of a file, and the constant parts of its f-strings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def first_column(page: str) -> list[str]:
    """What stands in backticks in the first column of the page's tables."""
    rows = [line.split("|")[1] for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [code for cell in rows for code in re.findall(r"`([^`]+)`", cell)]


def documented_metrics() -> set[str]:
    return set(first_column("metrics.md"))


def test_every_metric_of_the_code_is_documented_and_no_other() -> None:
    """Which rows hold which of them is held against a run by `tests/e2e/test_any_model.py`."""
    named = {text for text in chain.from_iterable(map(texts, sources())) if METRIC.fullmatch(text)}
    reasons = {metric for metric in documented_metrics() if metric.startswith("buffer/dropped_")}
    assert (named | EVERY_ROW) - documented_metrics() == set()
    assert documented_metrics() - reasons - named - EVERY_ROW == set()
    assert len(first_column("metrics.md")) == len(documented_metrics())


def test_every_reason_to_drop_a_prompt_is_documented() -> None:
    """Reasons are words that the ledger and its caller use: the other words of their arguments are states and keys."""
    calls = [
        node
        for path in (ROOT / "monarch_rl/ledger.py", ROOT / "actors/replay_buffer.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("_drop", "_give_up", "drop", "failed")
    ]
    words = (node.value for call in calls for arg in call.args for node in ast.walk(arg) if isinstance(node, ast.Constant))
    reasons = {word for word in words if isinstance(word, str)} | {"unscorable"}
    documented = {metric.removeprefix("buffer/dropped_") for metric in documented_metrics() if metric.startswith("buffer/dropped_")}
    assert documented == reasons


def test_the_table_of_keys_is_current() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown_page() + "\n", "write it anew: python -m monarch_rl.configure > docs/configuration.md"


def messages() -> list[str]:
    """Fragments of messages, cut at what differs from case to case."""
    fragments = chain.from_iterable(code.split("…") for code in first_column("troubleshooting.md"))
    return [fragment.strip() for fragment in fragments if len(fragment.strip()) >= 8]


def test_messages_that_are_explained_exist() -> None:
    said = "\n".join(chain.from_iterable(map(texts, sources())))
    assert [fragment for fragment in messages() if fragment not in said and fragment not in documented_metrics()] == []
    assert len(messages()) > 20


def waits() -> Iterator[tuple[str, str]]:
    """Name and deadline of each wait for an actor, as the code has them; `…` stands for what differs."""
    at = {"answer": (1, 2), "answer_blocking": (1, 2), "each": (1, 2), "waiting": (0, 1), "alive": (0, 9)}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if called in at and isinstance(node, ast.Call) and len(node.args) > at[called][0]:
                name, deadline = (
                    node.args[i] if i < len(node.args) else ast.Constant("each" if called == "each" else None) for i in at[called]
                )
                if isinstance(name, ast.Constant | ast.JoinedStr):
                    parts = [name] if isinstance(name, ast.Constant) else name.values
                    said = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
                    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                    yield said, "900 s" if called == "alive" else deadline_of(deadline, vars(module))


def deadline_of(node: ast.expr, names: dict[str, object]) -> str:
    """Empty where it takes a calculation, or is not said."""
    text = ast.unparse(node)
    if text == "None":
        return "alive"
    if found := re.search(r"config\.([a-z]+\.[a-z_]+)$", text):
        return f"`{found[1]}`"
    value = names.get(text) if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
    return f"{value:g} s" if isinstance(value, float) else ""


def test_the_table_of_waits_has_their_deadlines() -> None:
    rows = [line.split(" | ") for line in (DOCS / "failures.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    table = {who.strip("| `"): deadline for who, deadline, _ in rows}
    found = {who: deadline for who, deadline in waits() if who not in ("… …", "trainers (…)")}  # whoever and whatever these are given
    assert len(found) > 30
    assert found.keys() - table.keys() == set()
    assert {who: (deadline, table[who]) for who, deadline in found.items() if deadline not in table[who]} == {}


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (DOCS / link).exists()]
    assert missing == []


def test_files_that_the_cuda_page_names_exist() -> None:
    for code in first_column("cuda.md"):
        if "/" in code:
            assert (ROOT / code).is_file(), code
        else:
            assert any(f"def {code}(" in path.read_text() or f"class {code}" in path.read_text() for path in sources()), code


def table_of(key: str) -> dict[str, str]:
    """Rows of the table of `losses.md` whose head names the key, by each code of their first column."""
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    rows = text.partition(f"\n| `{key}` |")[2].partition("\n\n")[0].splitlines()[2:]
    return {code: row for row in rows for code in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize("key", ALGORITHMS)
def test_the_tables_of_losses_name_all_with_their_defaults(key: str) -> None:
    rows, (_, functions) = table_of(key), TABLES[key.split(".")[1]]
    assert rows.keys() == set(ALGORITHMS[key])
    for name in ALGORITHMS[key]:
        parameters = inspect.signature(functions[name]).parameters.values()
        said = {f"{p.name}={p.default:g}" for p in parameters if p.default is not p.empty}
        written = {word.replace("1e-4", "0.0001").replace("1e-8", "1e-08") for word in re.findall(r"\w+=[\d.e-]+", rows[name])}
        assert written == said, name


def test_the_table_of_old_policies_is_whole() -> None:
    assert table_of("trainer.proximal").keys() == set(schema()["trainer.proximal"].choices)


def test_the_loss_of_the_page_can_be_used() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "losses.md").read_text(encoding="utf-8"), re.DOTALL)
    own: dict[str, object] = {}
    exec(code, own)
    Objective.of(TrainerConfig(loss=own["soft"], loss_args={"cap": 3}))
