"""Schema, recipe search, profiles, provenance, strict keys and the rules between them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from monarch_rl import configure
from monarch_rl.config import (
    LEAST,
    MAY_BE_ZERO,
    BufferConfig,
    Config,
    ConfigError,
    GeneratorConfig,
    TrainerConfig,
    schema,
    validate,
)
from monarch_rl.configure import (
    PACKAGED_RECIPES,
    find_gpu,
    flatten,
    help_table,
    load,
    nearest,
    provenance_table,
    read_recipe,
    recipe_names,
    write,
)
from monarch_rl.trainer_config import aggregation_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in an empty folder on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configure, "find_gpu", lambda: (False, "no NVIDIA GPU found"))
    return tmp_path


def recipe(text: str, name: str = "mine") -> str:
    Path("recipes").mkdir(exist_ok=True)
    Path(f"recipes/{name}.yaml").write_text(text)
    return f"recipe={name}"


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Schema


def test_every_key_has_help_and_the_tables_of_bounds_name_real_keys() -> None:
    assert all(key.help for key in schema().values())
    assert {key for key, _ in flatten(asdict(Config()))} == schema().keys()
    assert all(schema()[name].hint is int for name in LEAST)
    assert all(schema()[name].hint is float for name in MAY_BE_ZERO)


def test_defaults_are_valid() -> None:
    validate(Config())


@pytest.mark.parametrize("width", [80, 120])
def test_help_table_lists_every_key_with_type_default_choices_within_the_width(width: int) -> None:
    table = help_table(width)
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    for key in schema().values():
        line = next(line for line in lines if line.split()[:1] == [f"{key.name}.*" if key.free else key.name])
        assert line.split()[1] == key.kind.split()[0]
        assert configure.show(key.default) in line
    assert "(constant, linear, cosine)" in table
    assert "peak learning rate of AdamW" in table


# Recipes and profiles


def test_packaged_recipe_is_found_from_any_folder() -> None:
    resolved = load(["recipe=grpo_qwen"])
    assert resolved.recipe_file == "recipes/grpo_qwen.yaml"
    assert resolved.config.output_dir == "runs/grpo_qwen"
    assert "grpo_qwen" in recipe_names()


def test_recipe_of_this_folder_comes_before_the_packaged_one() -> None:
    assert load([recipe("steps: 7", "grpo_qwen")]).config.steps == 7


def test_recipe_by_path_is_named_after_the_file() -> None:
    Path("deep").mkdir()
    Path("deep/try.yaml").write_text("steps: 3")
    resolved = load(["recipe=deep/try.yaml"])
    assert (resolved.config.recipe, resolved.config.output_dir) == ("try", "runs/try")
    assert resolved.sources["steps"] == "deep/try.yaml"
    assert resolved.sources["recipe"] == "command line"


def test_unknown_recipe() -> None:
    said = "did you mean 'grpo_qwen'? recipes: calculator, cispo, dapo, grpo_qwen, grpo_qwen_lora, gspo, rloo; a path must end in .yaml"
    assert refusal("recipe=grpo_qwne") == f"no recipe 'grpo_qwne'; {said}"
    assert refusal("recipe=no/such.yaml") == "recipe=no/such.yaml: there is no such file"


def test_without_recipe_the_output_needs_a_place() -> None:
    assert "recipe=NAME" in refusal("steps=2")
    assert load(["steps=2", "output_dir=out"]).config == replace(Config(), steps=2, output_dir="out", profile="cpu")


@pytest.mark.parametrize(("gpu", "profile", "path", "lr"), [(False, "cpu", "tiny", 3e-4), (True, "cuda", "Qwen/Qwen3-0.6B", 1e-6)])
def test_auto_profile_follows_the_machine(gpu: bool, profile: str, path: str, lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configure, "find_gpu", lambda: (gpu, "so it seems"))
    resolved = load(["recipe=grpo_qwen"])
    assert (resolved.profile, resolved.config.profile) == (profile, profile)
    assert resolved.profile_reason == "auto: so it seems"
    assert (resolved.config.model.path, resolved.config.trainer.lr) == (path, lr)
    assert (resolved.config.buffer.prompts_per_step, resolved.config.generator.group_size) == (32, 8)


def test_auto_without_the_section_it_picks_is_an_error_and_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configure, "find_gpu", lambda: (True, "/dev/nvidia0 is there"))
    message = refusal(recipe("profiles: {cpu: {steps: 1}, slow: {steps: 2}}"))
    assert message == "profile: no 'cuda' (auto: /dev/nvidia0 is there); recipes/mine.yaml has cpu, slow"


def test_unknown_profile() -> None:
    assert refusal("recipe=grpo_qwen", "profile=gpu").endswith("recipes/grpo_qwen.yaml has cpu, cuda")
    assert refusal(recipe("steps: 3"), "profile=cuda") == "profile: no 'cuda'; recipes/mine.yaml has no profiles"


def test_a_recipe_can_fix_its_profile_and_the_command_line_can_change_it() -> None:
    name = recipe("profile: big\nprofiles: {cpu: {steps: 1}, big: {steps: 2}}")
    assert load([name]).config.steps == 2
    assert load([name]).profile_reason == "named in recipes/mine.yaml"
    assert load([name, "profile=cpu"]).config.steps == 1
    assert load([name, "profile=auto"]).config.profile == "cpu"


def test_precedence_and_provenance() -> None:
    name = recipe("steps: 1\nseed: 1\ntrainer: {lr: 1e-5, warmup_steps: 1}\nprofiles: {cpu: {seed: 2, trainer.lr: 2e-5}}")
    resolved = load([name, "trainer.lr=3e-5"])
    config = resolved.config
    assert (config.steps, config.seed, config.trainer.lr, config.trainer.warmup_steps) == (1, 2, 3e-5, 1)
    expected = {
        "trainer.lr": "command line",
        "seed": "recipes/mine.yaml [cpu]",
        "steps": "recipes/mine.yaml",
        "trainer.loss": "default",
        "recipe": "command line",
        "profile": "auto",
    }
    assert {key: resolved.sources[key] for key in expected} == expected
    assert resolved.sources.keys() == schema().keys()
    rows = [line.split(maxsplit=2) for line in provenance_table(resolved).splitlines()]
    assert ["trainer.lr", "3e-05", "command line"] in rows
    assert ["seed", "2", "recipes/mine.yaml [cpu]"] in rows


def test_the_last_of_two_equal_keys_counts() -> None:
    assert load(["recipe=grpo_qwen", "seed=1", "seed=2"]).config.seed == 2


@pytest.mark.parametrize(
    ("hidden", "devices", "found"),
    [
        ("", ["nvidia0"], False),
        ("-1", ["nvidia0"], False),
        ("3", ["nvidia3"], True),
        (None, ["nvidia0"], True),
        ("0", ["nvidiactl"], False),
    ],
)
def test_find_gpu(hidden: str | None, devices: list[str], found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that names GPUs does not conjure one up; device files count, hiding them counts more."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(Path, "glob", lambda _, pattern: [Path("/dev") / d for d in devices if Path(d).match(pattern)])
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert find_gpu()[0] is found


# Files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nsteps: [1}", "recipes/mine.yaml line 2: "),
        ("steps: 1\nsteps: 2", "recipes/mine.yaml line 2: "),
        ("- 1", "recipes/mine.yaml: must hold a mapping"),
        ("profiles: [cpu]", "recipes/mine.yaml: profiles: must be a mapping"),
        ("profiles: {cpu: {profile: cuda}}", "recipes/mine.yaml [cpu]: a profile cannot set 'profile'"),
        ("trainer: {lrr: 1}", "recipes/mine.yaml: unknown key 'trainer.lrr'; did you mean 'trainer.lr'?"),
        ("profiles: {cpu: {step: 1}}", "recipes/mine.yaml [cpu]: unknown key 'step'; did you mean 'steps'?"),
        ("trainer: 3", "recipes/mine.yaml: trainer is a section"),
        ("task:", "task: must be a name, or a list of {name: ..., weight: ..., args: ...}, got None"),
        ("task_args: {1: 2}", "recipes/mine.yaml: task_args: must be a mapping"),
        ("steps: ???", "recipes/mine.yaml: steps: "),
        ("seed: ${sed}", "recipes/mine.yaml: seed: Interpolation key 'sed' not found"),
    ],
)
def test_faults_in_files_name_the_file(text: str, expected: str) -> None:
    assert refusal(recipe(text)).startswith(expected)


def test_empty_files_and_bare_headings_are_fine() -> None:
    assert load([recipe("")]).config.steps == Config().steps
    assert load([recipe("trainer:\ngenerator: {engine: }\nbuffer: {}")]).config.trainer == TrainerConfig()


def test_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "there")
    config = load([recipe("seed: 5\noutput_dir: ${oc.env:PLACE}/${recipe}-${seed}")]).config
    assert config.output_dir == "there/mine-5"


# Keys and values on the command line


def test_case_68_a_mistyped_key_is_an_error_that_names_the_nearest() -> None:
    """Case 68 (unsloth#10452, hydra#1951, OpenMHC#14, open-instruct#1823)."""
    assert refusal("recipe=grpo_qwen", "learning_rte=1") == "command line: unknown key 'learning_rte'; did you mean 'trainer.lr'?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", ["trainer.lr"]),
        ("workers", ["scorer.workers", "rollout.workers"]),
        ("train.lr", ["trainer.lr"]),
        ("buffer.max_aeg", ["buffer.max_age"]),
        ("group_sise", ["generator.group_size"]),
        ("+trainer.lr", ["trainer.lr"]),
        ("--steps", ["steps"]),
        ("generator.engin.max_num_seqs", ["generator.engine"]),
        ("zzzz", []),
    ],
)
def test_nearest(typed: str, meant: list[str]) -> None:
    assert nearest(typed) == meant


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("seed", "command line: 'seed' has no '='; settings are key=value, e.g. seed=0"),
        ("--prnt", "unknown option '--prnt'; options are --help, --print, --dry-run, settings are key=value"),
        ("zzzz=1", "command line: unknown key 'zzzz'; --help lists all keys"),
        ("trainer.clip_low=1", "command line: unknown key 'trainer.clip_low'; did you mean 'trainer.loss_args.clip_low'?"),
        ("steps.x=1", "command line: unknown key 'steps.x'; did you mean 'steps'?"),
        ("profiles.cpu.steps=1", "command line: unknown key 'profiles.cpu.steps'; did you mean 'steps'?"),
        ("eval=3", "command line: eval is a section and takes no value (3); it holds eval.every, eval.prompts"),
        ("steps=1.5", "command line: steps: must be a whole number, got 1.5"),
        ("steps=", "command line: steps: must be a whole number, got None"),
        ("steps=true", "command line: steps: must be a whole number, got True"),
        ("trainer.lr=fast", "command line: trainer.lr: must be a number, got 'fast'"),
        ("trainer.lr=${seed}x", "command line: trainer.lr: "),
        ("trainer.betas=[1,2,3]", "command line: trainer.betas: must be a list of 2 numbers, got [1, 2, 3]"),
        ("trainer.activation_checkpointing=maybe", "command line: trainer.activation_checkpointing: must be true or false, got 'maybe'"),
        ("task_args=3", "command line: task_args: must be a mapping, e.g. task_args.name=value, got 3"),
        ("generator.engine.x={a", "command line: generator.engine.x: cannot read '{a' as YAML"),
        ("generator.engine.x=${", "command line: generator.engine.x: "),
    ],
)
def test_faults_on_the_command_line(argument: str, expected: str) -> None:
    assert refusal("recipe=grpo_qwen", argument).startswith(expected)


def test_values_arrive_as_typed() -> None:
    typed = ["trainer.lr=1e-5", "trainer.betas=[0, 0.5]", "trainer.activation_checkpointing=true", "output_dir=1e3", "task=on"]
    config = load(["recipe=grpo_qwen", *typed]).config
    assert (config.trainer.lr, config.trainer.betas, config.trainer.activation_checkpointing) == (1e-5, (0.0, 0.5), True)
    assert (config.output_dir, config.task) == ("1e3", "on")


def test_free_form_mappings() -> None:
    """`generator.engine.*` and `task_args.*` take anything, layer by layer; `={}` clears what came before."""
    name = recipe("task_args: {hi: 9, deep: {a: 1, b: 2}}\ngenerator: {engine: {overrides: {x.y: 1}}}")
    resolved = load([name, "task_args.deep.b=[1, 2]", "task_args.new=null", "generator.engine.max_num_seqs=64"])
    assert resolved.config.task_args == {"hi": 9, "deep": {"a": 1, "b": [1, 2]}, "new": None}
    assert resolved.config.generator.engine == {"overrides": {"x.y": 1}, "max_num_seqs": 64}
    assert resolved.sources["task_args.deep.a"] == "recipes/mine.yaml"
    assert resolved.sources["task_args.deep.b"] == "command line"
    assert load([name, "task_args={}"]).config.task_args == {}
    assert load([name, "task_args={}", "task_args.z=1"]).config.task_args == {"z": 1}
    assert load([name, "task_args.deep=4"]).config.task_args == {"hi": 9, "deep": 4}


def test_losses_are_known_by_name_with_their_arguments() -> None:
    trainer = load(
        ["recipe=grpo_qwen", "trainer.loss=gspo", "trainer.loss_args.clip_high=0.1", "trainer.correction=[tis, mask_age]"]
    ).config.trainer
    assert (trainer.loss, trainer.loss_args, trainer.correction) == ("gspo", {"clip_high": 0.1}, ["tis", "mask_age"])
    assert (aggregation_of(TrainerConfig(loss="gspo")), aggregation_of(TrainerConfig())) == ("sequence_mean", "token_mean")
    load(["recipe=grpo_qwen", "trainer.correction=[tis, icepop]", "trainer.correction_args={cap: 3, high: 2}"])
    load(["recipe=grpo_qwen", "trainer.advantage=reinforce_pp", "buffer.dead_groups=keep", "generator.group_size=1"])
    for key, said in [("loss=dpao", "'dpao'; did you mean 'dapo'?"), ("correction=[tis, icepo]", "'icepo'; did you mean 'icepop'?")]:
        message = refusal("recipe=grpo_qwen", f"trainer.{key}")
        assert message.startswith(f"trainer.{key.partition('=')[0]}: must be one of ")
        assert message.endswith(f"or path/to/file.py:NAME, got {said}")


# Written and read again


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["profile=cuda"],
        [
            "trainer.betas=[0.1, 0.2]",
            "task=123",
            "output_dir=a b: #c",
            "task_args.text=1e5",
            "task_args.quoted='1e-5'",
            "task_args.pattern=\\${x}",
            "task_args.deep={a: [1, {b: off}], c: null}",
            "generator.engine.ratio=.5",
        ],
    ],
)
def test_round_trip(overrides: list[str]) -> None:
    """What was written gives the same configuration again, whatever machine reads it."""
    first = load(["recipe=grpo_qwen", *overrides])
    path = Path("runs/x/config.yaml")
    write(first.config, path)
    again = load([f"recipe={path}"])
    assert again.config == first.config
    assert again.profile_reason == "named in runs/x/config.yaml"
    assert set(again.sources.values()) == {"runs/x/config.yaml"}
    assert read_recipe(str(path)).profiles == {}
    write(again.config, Path("again.yaml"))
    assert path.read_text() == Path("again.yaml").read_text()
    assert load([f"recipe={path}", "output_dir=new"]).config == replace(first.config, output_dir="new")


def test_round_trip_keeps_a_profile_that_this_machine_would_not_pick() -> None:
    write(load(["recipe=grpo_qwen", "profile=cuda"]).config, Path("config.yaml"))
    assert load(["recipe=config.yaml"]).profile == "cuda"
    assert refusal("recipe=config.yaml", "profile=cpu") == "profile: no 'cpu'; config.yaml has no profiles"


# Rules


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("steps=0", "steps: must be at least 1, got 0"),
        ("seed=-1", "seed: must be at least 0, got -1"),
        ("trainer.ranks=0", "trainer.ranks: must be at least 1, got 0"),
        ("weights.slots=1", "weights.slots: must be at least 2, got 1"),
        ("buffer.max_age=-1", "buffer.max_age: must be at least 0, got -1"),
        ("generator.temperature=0", "generator.temperature: must be a finite number above 0, got 0.0"),
        ("generator.top_k=-1", "generator.top_k: must be at least 0, got -1"),
        ("generator.top_p=0", "generator.top_p: must be a finite number above 0, got 0.0"),
        ("generator.top_p=1.1", "generator.top_p: must be at most 1, got 1.1"),
        ("generator.min_p=-0.1", "generator.min_p: must be a finite number of at least 0, got -0.1"),
        ("generator.min_p=2", "generator.min_p: must be at most 1, got 2"),
        ("generator.stop=['']", "generator.stop: must hold texts of at least one character each"),
        ("generator.stop_ids=[a]", "command line: generator.stop_ids: must be a list of whole numbers, got ['a']"),
        ("generator.stop=x", "command line: generator.stop: must be a list of texts, got 'x'"),
        ("generator.truncated=no", "command line: generator.truncated: must be one of keep, mask, drop, got 'no'"),
        ("trainer.kl=-1", "trainer.kl: must be a finite number of at least 0, got -1.0"),
        ("trainer.kl_estimator=k4", "command line: trainer.kl_estimator: must be one of k1, k2, k3, unbiased, got 'k4'"),
        ("trainer.entropy=-1", "trainer.entropy: must be a finite number of at least 0, got -1.0"),
        ("trainer.lr=nan", "trainer.lr: must be a finite number above 0, got nan"),
        ("trainer.lr=.inf", "trainer.lr: must be a finite number above 0, got inf"),
        ("trainer.max_grad_norm=-1", "trainer.max_grad_norm: must be a finite number of at least 0, got -1.0"),
        ("trainer.betas=[0.9,1]", "trainer.betas: must each be at least 0 and below 1, got [0.9, 1.0]"),
        ("trainer.loss_args.clip_low=1.5", "trainer.loss_args.clip_low: must be at most 1, got 1.5"),
        ("trainer.loss_args.clip_hihg=1", "trainer.loss_args.clip_hihg: dapo takes clip_high, clip_low; did you mean 'clip_high'?"),
        ("trainer.loss_args.clip_high=yes", "trainer.loss_args.clip_high: must be a finite number of at least 0, got True"),
        (
            "trainer.advantage=grpo trainer.advantage_args.epsilon=0",
            "trainer.advantage_args.epsilon: must be a finite number above 0, got 0",
        ),
        ("trainer.advantage_args.epsilon=1", "trainer.advantage_args.epsilon: mean takes no arguments"),
        ("trainer.correction_args.cap=-1", "trainer.correction_args.cap: none takes no arguments"),
        ("trainer.correction=[]", "trainer.correction: must name at least one; none is a name too"),
        ("trainer.loss=nothing.py:fn", "trainer.loss=nothing.py:fn: there is no file nothing.py"),
        (
            "trainer.loss=notebook:fn",
            "trainer.loss=notebook:fn was defined in a notebook: put it into a file, and use trainer.loss=path/to/file.py:fn",
        ),
        ("rollout.deadline_s=0", "rollout.deadline_s: must be a finite number above 0, got 0.0"),
        ("generator.engine.model=x", "generator.engine.model: not passed on to vLLM; set model.path"),
        (
            "generator.engine.tensor_parallel_size=2",
            "generator.engine.tensor_parallel_size: not passed on to vLLM; set generator.tensor_parallel",
        ),
    ],
)
def test_ranges(argument: str, expected: str) -> None:
    assert refusal("recipe=grpo_qwen", *argument.split()) == expected


@pytest.mark.parametrize("key", ["trainer.warmup_steps", "eval.every", "eval.prompts", "trainer.max_grad_norm", "buffer.max_age"])
def test_zero_means_none(key: str) -> None:
    load(["recipe=grpo_qwen", f"{key}=0"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["buffer.max_age=0", "buffer.window=2"], ["buffer.window=2", "buffer.max_age=0", "at most 1"]),
        (["buffer.max_age=1", "buffer.window=34"], ["buffer.window=34", "buffer.max_age=1", "at most 33"]),
        (["weights.every=4"], ["weights.every=4", "buffer.max_age=2", "at most 3"]),
        (["weights.every=3", "buffer.window=2"], ["weights.every=3", "buffer.window=2", "at most 2"]),
        (["generator.group_size=1"], ["generator.group_size", "trainer.advantage=mean"]),
        (["trainer.advantage=reinforce_pp"], ["buffer.dead_groups=replace", "trainer.advantage=reinforce_pp", "keep"]),
        (["trainer.schedule=cosine", "steps=5"], ["trainer.warmup_steps=5", "steps=5", "trainer.schedule=cosine"]),
    ],
)
def test_case_69_settings_that_exclude_each_other_are_refused_by_name(arguments: list[str], named: list[str]) -> None:
    """Case 69 (axolotl#3486 review); the first four are the admission rule of the ledger."""
    message = refusal("recipe=grpo_qwen", *arguments)
    assert all(word in message for word in named), message


@pytest.mark.parametrize("arguments", ["buffer.max_age=1 buffer.window=33", "weights.every=3", "weights.every=2 buffer.window=33"])
def test_the_edge_of_what_is_allowed(arguments: str) -> None:
    load(["recipe=grpo_qwen", *arguments.split()])


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Config(trainer=TrainerConfig(loss="grop")), "trainer.loss"),
        (Config(trainer=TrainerConfig(advantage=None)), "trainer.advantage"),
        (Config(trainer=TrainerConfig(correction=["tis", 3])), "trainer.correction"),
        (Config(trainer=TrainerConfig(lr="1e-4")), "trainer.lr"),  # type: ignore[arg-type]
        (Config(buffer=BufferConfig(max_age=True)), "buffer.max_age"),
        (Config(generator=GeneratorConfig(replicas=1.5)), "generator.replicas"),  # type: ignore[arg-type]
    ],
)
def test_a_configuration_made_in_python_is_checked_too(config: Config, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: must be"):
        validate(config)


@pytest.mark.parametrize("name", sorted(file.stem for file in PACKAGED_RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_resolves(name: str) -> None:
    """A recipe named after a loss or an advantage has it."""
    trainer = load([f"recipe={name}", "profile=auto"]).config.trainer
    assert name in (trainer.loss, trainer.advantage, "grpo_qwen", "grpo_qwen_lora", "calculator")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_shipped_recipe_resolves_in_each_profile(name: str) -> None:
    config = load(["recipe=grpo_qwen", f"profile={name}"]).config
    assert (config.trainer.loss, config.trainer.advantage, config.buffer.max_age, config.trainer.warmup_steps) == ("dapo", "mean", 2, 5)
    assert config.task == {"cpu": "arithmetic", "cuda": "gsm8k"}[name]
    assert config.model.dtype == {"cpu": "float32", "cuda": "bfloat16"}[name]
