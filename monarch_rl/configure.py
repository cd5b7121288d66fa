"""From a command line to a checked `Config`: defaults, then the recipe, then its profile, then `key=value`.

Every value keeps where it came from. Imports neither torch nor vllm.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from monarch_rl.config import Config, ConfigError, Key, is_object, label, schema, validate
from monarch_rl.trainer_config import section_of

PACKAGED_RECIPES = Path(__file__).parent.parent / "recipes"
"""Beside the package, in a checkout as in site-packages."""
COMMAND_LINE = "command line"
Values = dict[str, Any]
"""Dotted key → value."""


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and where each of its values came from."""

    config: Config
    sources: dict[str, str]
    """Dotted key → `default`, `recipes/NAME.yaml`, `recipes/NAME.yaml [profile]` or `command line`; `auto` for a detected profile."""
    profile: str
    profile_reason: str
    """Why this profile, e.g. `auto: no NVIDIA GPU found`."""
    recipe_file: str
    """As in `sources`; empty where there is no recipe."""


@dataclass(frozen=True)
class Recipe:
    """A recipe file as it was read."""

    name: str
    label: str
    body: Values
    profiles: dict[str, Values]


def load(argv: Sequence[str]) -> Resolved:
    """Resolve `recipe=NAME key=value …` (flags already removed); of a key given twice the last counts.

    Raises:
        ConfigError: a recipe, profile, key or value is wrong; the message says where and what is allowed.
    """
    line = dict(_parse_argument(argument) for argument in argv)
    recipe = read_recipe(line.pop("recipe", ""))
    profile, reason, profile_source = _choose_profile(recipe, line)
    values, sources = _merge(
        (recipe.label, recipe.body),
        (f"{recipe.label} [{profile}]", recipe.profiles.get(profile, {})),
        (COMMAND_LINE, line),
    )
    values |= {"profile": profile, "recipe": recipe.name}
    sources |= {"profile": profile_source, "recipe": sources.get("recipe", COMMAND_LINE if recipe.name else "default")}
    if not recipe.name and "output_dir" not in values:
        raise ConfigError(f"no recipe: say recipe=NAME, or output_dir=PATH to go without; recipes: {', '.join(recipe_names())}")
    config = _build(values, sources)
    validate(config)
    sources = {key: sources.get(key, "default") for key, _ in flatten(asdict(config))}
    return Resolved(config, sources, profile, reason, recipe.label)


def write(config: Config, path: Path) -> None:
    """Write a resolved configuration as YAML that `recipe=path` reads back to an equal one."""
    head = "# Resolved configuration; to run it again: python -m monarch_rl.run recipe=PATH_OF_THIS_FILE\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + OmegaConf.to_yaml(OmegaConf.create(_escape(asdict(config)))), encoding="utf-8")


def _escape(value: Any) -> Any:
    """Keep `${` in a resolved text from being read as an interpolation."""
    match value:
        case str():
            return value.replace("${", r"\${")
        case dict():
            return {key: _escape(item) for key, item in value.items()}
        case list() | tuple():
            return [_escape(item) for item in value]
    return label(value) if is_object(value) else value


# Recipes


def recipe_names() -> list[str]:
    """Names that `recipe=` finds from here."""
    return sorted({file.stem for folder in (Path("recipes"), PACKAGED_RECIPES) for file in folder.glob("*.yaml")})


def read_recipe(recipe: str) -> Recipe:
    """Read a recipe: a path that ends in .yaml, or a name in ./recipes or beside the package; an empty name is an empty recipe."""
    if not recipe:
        return Recipe("", "", {}, {})
    if recipe.endswith((".yaml", ".yml")):
        name, label, files = Path(recipe).stem, recipe, [Path(recipe)]
    else:
        name, label = recipe, f"recipes/{recipe}.yaml"
        files = [folder / f"{recipe}.yaml" for folder in (Path("recipes"), PACKAGED_RECIPES)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        if recipe == label:
            raise ConfigError(f"recipe={recipe}: there is no such file")
        near = get_close_matches(name, recipe_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no recipe {recipe!r}; {hint}recipes: {', '.join(recipe_names())}; a path must end in .yaml")
    body = _read_yaml(file, label)
    profiles = body.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(section, dict) for section in profiles.values()):
        raise ConfigError(f"{label}: profiles: must be a mapping of profile names to settings")
    for profile, section in profiles.items():
        for key in section.keys() & {"recipe", "profile", "profiles"}:
            raise ConfigError(f"{label} [{profile}]: a profile cannot set {key!r}")
    return Recipe(str(body.get("recipe") or name), label, body, profiles)


def _read_yaml(file: Path, label: str) -> Values:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except yaml.MarkedYAMLError as error:
        where = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{label}{where}: {error.problem}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{label}: {_first_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{label}: must hold a mapping of keys to values")
    return {str(key): value for key, value in tree.items()}


def _choose_profile(recipe: Recipe, line: Values) -> tuple[str, str, str]:
    """The name of the profile, the reason in words, and the source for the provenance table."""
    source = COMMAND_LINE if "profile" in line else recipe.label
    name = str(line.get("profile") or recipe.body.get("profile") or "auto")
    reason = f"named on the {COMMAND_LINE}" if source == COMMAND_LINE else f"named in {source}"
    if name == "auto":
        has_gpu, found = find_gpu()
        name, reason, source = "cuda" if has_gpu else "cpu", f"auto: {found}", "auto"
    have = ", ".join(recipe.profiles) or "no profiles"
    if recipe.profiles and name not in recipe.profiles:
        raise ConfigError(f"profile: no {name!r} ({reason}); {recipe.label} has {have}")
    if not recipe.profiles and source == COMMAND_LINE and name != recipe.body.get("profile"):
        raise ConfigError(f"profile: no {name!r}; {recipe.label or 'a run without recipe'} has {have}")
    return name, reason, source


def find_gpu() -> tuple[bool, str]:
    """Whether this machine has an NVIDIA GPU that a process started here may use, and how we know; without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return False, "CUDA_VISIBLE_DEVICES hides every GPU"
    if devices := sorted(Path("/dev").glob("nvidia[0-9]*")):
        return True, f"{devices[0]} is there"
    if Path("/dev/dxg").exists() and shutil.which("nvidia-smi"):
        return True, "/dev/dxg and nvidia-smi are there"  # WSL
    return False, "no NVIDIA GPU found"


# Keys and values


def _parse_argument(argument: str) -> tuple[str, Any]:
    """`key=value` → key and value. Text and names stay as typed, so that `on` or `1e3` are not read as something else."""
    name, equals, text = argument.partition("=")
    if not equals:
        if argument.startswith("-"):
            raise ConfigError(f"unknown option {argument!r}; options are --help, --print, --dry-run, settings are key=value")
        raise ConfigError(f"{COMMAND_LINE}: {argument!r} has no '='; settings are key=value, e.g. seed=0")
    key = schema().get(name)
    if key and (not text.startswith("[") if key.hint is Any else key.hint is str or key.choices):
        return name, text
    try:
        return name, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{COMMAND_LINE}: {name}: cannot read {text!r} as YAML") from error


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by dotted key. An empty mapping is a leaf, and so is one whose keys a dotted key could not say."""
    for name, value in tree.items():
        if isinstance(value, dict) and value and all(isinstance(key, str) and "." not in key for key in value):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _merge(*layers: tuple[str, Values]) -> tuple[Values, dict[str, str]]:
    """Later layers win. A leaf replaces what was below it: `task_args={}` clears the recipe's arguments."""
    values: Values = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for name, value in flatten(layer):
            if source != COMMAND_LINE and _is_bare_heading(name, value):
                continue
            _check_key(name, value, source)
            for other in [o for o in values if o.startswith(f"{name}.") or name.startswith(f"{o}.")]:
                del values[other], sources[other]
            values[name], sources[name] = value, source
    return values, sources


def _check_key(name: str, value: Any, label: str) -> None:
    if name in schema() or any(key.free and name.startswith(f"{key.name}.") for key in schema().values()):
        return
    if _is_section(name):
        inside = ", ".join(key for key in schema() if key.startswith(f"{name}."))
        raise ConfigError(f"{label}: {name} is a section and takes no value ({value!r}); it holds {inside}")
    near = " or ".join(repr(key) for key in nearest(name))
    raise ConfigError(f"{label}: unknown key {name!r}; " + (f"did you mean {near}?" if near else "--help lists all keys"))


def _is_section(name: str) -> bool:
    return any(key.startswith(f"{name}.") for key in schema())


def _is_bare_heading(name: str, value: Any) -> bool:
    """`trainer:` with nothing below it, as files have it while they are edited."""
    key = schema().get(name)
    return (value is None and key.free) if key else (value in (None, {}) and _is_section(name))


def nearest(name: str) -> list[str]:
    """Keys that may have been meant: those with this last part, else the one most like it in name or in its help text."""
    tail = name.rpartition(".")[2]
    if same := [key for key in schema() if key.rpartition(".")[2] == tail]:
        return same
    if args := section_of(tail):
        return [f"{args}.{tail}"]
    score, _, best = max((_likeness(name, tail, key), -len(key.help), key.name) for key in schema().values())
    return [best] if score >= 0.6 else []


def _likeness(name: str, tail: str, key: Key) -> float:
    """0 to 1. Words of the help count too, for less: `learning_rate` means trainer.lr, the 'peak learning rate of AdamW'."""
    words, said = key.help.split(), tail.replace("_", " ")
    count = len(said.split())
    phrases = [" ".join(words[at : at + count]) for at in range(len(words) - count + 1)]
    by_help = max((_ratio(said, phrase) for phrase in phrases), default=0.0)
    by_name = max(_ratio(name, key.name), _ratio(tail, key.name.rpartition(".")[2]))
    return max(by_name, 0.8 * by_help if by_help > 0.85 else 0.0)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _build(values: Values, sources: Mapping[str, str]) -> Config:
    """Real dataclasses from dotted values; OmegaConf checks the types and resolves `${…}`."""
    tree = OmegaConf.structured(Config)
    for name, value in values.items():
        try:
            OmegaConf.update(tree, name, value, force_add=name not in schema())
        except OmegaConfBaseException as error:
            key = schema().get(name)
            allowed = f"must be {key.allowed}, got {value!r}" if key else _first_line(error)
            raise ConfigError(f"{sources[name]}: {name}: {allowed}") from error
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        name = str(error.full_key)
        raise ConfigError(f"{sources.get(name, 'default')}: {name}: {_first_line(error)}") from error
    assert isinstance(config, Config)
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# Tables


def show(value: Any) -> str:
    """A value as one would type it."""
    match value:
        case "":
            return "''"
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case list() | tuple():
            return f"[{', '.join(show(item) for item in value)}]"
        case dict():
            return f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    return str(value)


def help_table(width: int) -> str:
    """Every key: name, type, default, and a line of help with the allowed values. In narrow terminals the help stands below."""
    blocks: list[str] = []
    section = None
    for key in schema().values():
        name = f"{key.name}.*" if key.free else key.name
        text = f"{key.help} ({', '.join(key.choices)})" if key.choices else key.help
        lead = f"  {name:<34}{key.kind:<11}{show(key.default):<16}"
        if key.name.rpartition(".")[0] != section:
            section = key.name.rpartition(".")[0]
            blocks.append("")
        if width >= 110:
            blocks.append(textwrap.fill(text, width, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False))
        else:
            blocks += [lead.rstrip(), textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(blocks)


def markdown_page() -> str:
    """Every key as docs/configuration.md; `python -m monarch_rl.configure > docs/configuration.md` writes it."""
    lines = [
        "# Configuration: every key",
        "",
        "Written by `python -m monarch_rl.configure > docs/configuration.md`. Where a key is set more than once, the last of these counts:",
        "default, recipe, its profile, command line. `--print` shows each value and where it came from.",
    ]
    section = None
    for key in schema().values():
        if (of := key.name.rpartition(".")[0]) != section:
            section = of
            lines += ["", f"## `{of}`" if of else "## The run", "| key | type | default | meaning |", "|---|---|---|---|"]
        name = f"{key.name}.*" if key.free else key.name
        kind = " \\| ".join(f"`{choice}`" for choice in key.choices) or key.kind
        lines.append(f"| `{name}` | {kind} | `{show(key.default)}` | {key.help} |")
    return "\n".join(lines)


def provenance_table(resolved: Resolved) -> str:
    """Every value and where it came from."""
    rows = [(key, show(value), resolved.sources[key]) for key, value in flatten(asdict(resolved.config))]
    wide = max(len(key) for key, _, _ in rows)
    value_wide = max(len(value) for _, value, _ in rows if len(value) <= 24)
    return "\n".join(f"  {key:<{wide}}  {value:<{value_wide}}  {source}" for key, value, source in rows)


if __name__ == "__main__":
    print(markdown_page())
