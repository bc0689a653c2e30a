"""The files in configs/ and what their page shows: valid, as their heads say, and fitting into their machines."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from dapo_mega.commands.serve import parse_arguments
from dapo_mega.config import RunConfig, SftConfig, load_config
from dapo_mega.planning.dry_run import print_dry_run

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted((REPOSITORY / "configs").glob("*.yaml"))
NAMES = [file.name for file in FILES]
PLANNED = [file.name for file in FILES if "architecture:" in file.read_text()]


def head(name):
    """The comment at the top of a file."""
    lines = (REPOSITORY / "configs" / name).read_text().splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def commands(name):
    """The commands in the head: lines that begin with three spaces, with those that continue them."""
    text = "\n".join(line.removeprefix("#") for line in head(name)).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.startswith("   ")]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_valid_in_a_dry_run(name, elsewhere, capsys):
    kind = SftConfig if "sft" in name else RunConfig
    print_dry_run(load_config(kind, Path("configs") / name))
    assert "dry run: the configuration is valid" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_its_head_are_for_this_file_and_run(name, elsewhere, capsys):
    ran = []
    for command in commands(name):
        words = shlex.split(command)
        if "--config" in words:
            assert words[words.index("--config") + 1] == f"configs/{name}"
        if words[0] == "python" and words[1].startswith("tools/"):
            ran.append(words[1])
            assert not tool(Path(words[1]).stem).main(words[2:])
        elif "launch/serve_rollouts.py" in command:
            options = parse_arguments(words[2 : words.index(">")] if ">" in words else words[2:])
            config = load_config(RunConfig, Path("configs") / name)
            assert (Path.cwd() / options.model, options.rendezvous) == (
                Path(config.model.path),
                config.rollout.fleet.rendezvous,
            )
            assert options.colocated == (config.rollout.placement == "colocated")
        elif "launch/" in command:
            assert any((REPOSITORY / word).is_file() for word in words if word.startswith("launch/"))
            ran += words[-1:]
    assert "--dry-run" in ran
    if name in PLANNED:
        assert "tools/plan_run.py" in ran


@pytest.mark.parametrize("name", PLANNED)
def test_a_run_for_gpus_fits_into_them_and_takes_as_long_as_its_head_says(name, elsewhere, capsys):
    tool("plan_run").main(next(shlex.split(line)[2:] for line in commands(name) if "tools/plan_run.py" in line))
    plan = capsys.readouterr().out
    assert "FIT" not in plan
    assert "  fits: " in plan
    text = " ".join(line.removeprefix("#") for line in head(name))
    assert "by the planner, not measured" in text
    seconds = float(re.search(r"with one round of generation ([\d.,]+) s", plan)[1].replace(",", ""))
    stated = re.search(r"about ([\d.]+) (seconds|minutes|hours) a step", text)
    assert seconds == pytest.approx(float(stated[1]) * {"s": 1, "m": 60, "h": 3600}[stated[2][0]], rel=0.1)
    config = load_config(RunConfig, Path("configs") / name)
    total = re.search(rf"([\d.]+) (minutes|hours|days) for {config.num_steps} steps", text)
    unit = {"m": 60, "h": 3600, "d": 86400}[total[2][0]]
    assert seconds * config.num_steps == pytest.approx(float(total[1]) * unit, rel=0.1)


PAGE = (REPOSITORY / "configs" / "README.md").read_text().partition("## Every key")[0]
BASE = {"output_dir": "o", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}


def test_every_example_of_a_file_on_the_page_is_valid():
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) >= 5
    for example in examples:
        RunConfig.model_validate({**BASE, "batch": {"tokens_per_microbatch": 32768}, **yaml.safe_load(example)})
