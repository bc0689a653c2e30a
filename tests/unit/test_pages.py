"""The documentation's pages: links lead somewhere, commands run as shown or say what they need, the README is short."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from dapo_mega.commands.main import COMMANDS
from dapo_mega.config import RunConfig, SftConfig, load_config
from dapo_mega.planning.dry_run import print_dry_run

PROJECT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("README.md", "launch/*.md", "configs/**/*.md", "tools/**/*.md", "tests/*.md", "dapo_mega/**/*.md")
    for page in PROJECT.glob(pattern)
)
NAMES = [str(page.relative_to(PROJECT)) for page in PAGES]
SCRIPTS = {
    "launch/train_dapo.py": "train",
    "launch/train_sft.py": "sft",
    "launch/serve_rollouts.py": "serve",
    "tools/ablate.py": "ablate",
    "tools/compare.py": "compare",
    "tools/convert_checkpoint.py": "convert",
    "tools/evaluate.py": "evaluate",
    "tools/plan_run.py": "plan",
    "tools/plot_run.py": "plot",
    "tools/prepare_data.py": "prepare",
    "tools/replay_step.py": "replay-step",
    "tools/show_samples.py": "show-samples",
}
# A simulation is run as shown, of one small step, and GPUs are divided of which there are few: those of a page take a
# minute.
FEW_GPUS = "16"
SMALL_SIMULATION = ["--simulated-steps", "1", "batch.group_size=4"]
SMALL_SIMULATION += [f"batch.{name}=8" for name in ("groups_per_step", "mini_batch_groups", "generation_groups")]
_SHELL = re.compile(r"(?:<!-- (?P<marker>[^>]*) -->\n\n? *)?```(?:bash|sh|shell)\n(?P<block>.*?)```", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(text):
    """A page without its code blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page):
    """The anchors that a code host makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_test_that_a_page_names_is_there():
    missing, file = [], Path()
    named = r"`((?:unit|integration|distributed|numerics|te_cpu)/[\w/]+\.py)?(?:::(\w+))?`"
    for page in PAGES:
        for path, test in re.findall(named, page.read_text()):
            file = PROJECT / "tests" / path if path else file
            if (path or test) and not (file.is_file() and (not test or f"def {test}(" in file.read_text())):
                missing.append(f"{page.name}: {file.name}::{test}")
    assert not missing


def test_every_link_leads_somewhere():
    broken = []
    for page in PAGES:
        for target in _LINK.findall(prose(page.read_text())):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (page.parent / path).resolve() if path else page
            file = file / "README.md" if file.is_dir() else file
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(PROJECT)}: {target}")
    assert not broken, "\n".join(broken)


def test_every_page_can_be_reached_from_the_readme():
    reached, queue = set(), [PROJECT / "README.md"]
    while queue:
        page = queue.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for target in _LINK.findall(prose(page.read_text())):
            file = (page.parent / target.partition("#")[0]).resolve()
            queue += [file / "README.md" if file.is_dir() else file] if file.exists() else []
    assert set(PAGES) - reached == set()


def test_commands_stand_in_fenced_blocks_where_they_are_checked():
    indented = re.compile(r"^ {4,}(?:python|torchrun|bash|dapo-mega|pip|export|until|for) .*", re.MULTILINE)
    found = [
        f"{name}: {line}"
        for name, page in zip(NAMES, PAGES, strict=True)
        for line in indented.findall(prose(page.read_text()))
    ]
    assert not found, "\n".join(found)


def test_the_readme_stays_a_front_door():
    assert len((PROJECT / "README.md").read_text().split()) <= 1200


def test_the_readmes_run_is_valid():
    (example,) = re.findall(r"```yaml\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert RunConfig.model_validate(yaml.safe_load(example)).num_steps == 200


def blocks(name):
    """(what the block needs or which test runs it, or None, its commands) of a page's shell blocks."""
    for found in _SHELL.finditer((PROJECT / name).read_text()):
        text = found["block"].replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        yield found["marker"], lines


def run_shown(command):
    """Run a command of ours in this process, and check that others exist."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if words[:2] == ["python", "-m"] and words[2] == "dapo_mega":
        words = ["dapo-mega", *words[3:]]
    if words[0] == "python" and words[1] in SCRIPTS:
        words = ["dapo-mega", SCRIPTS[words[1]], *words[2:]]
    if words[0] != "dapo-mega":
        return False
    assert words[1] in {*COMMANDS, "--help", "--version"}, command
    if words[1] not in COMMANDS:
        return True
    if "--dry-run" in words and words[1] in ("train", "sft"):
        overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
        kind = SftConfig if words[1] == "sft" else RunConfig
        print_dry_run(load_config(kind, Path(words[words.index("--config") + 1]), overrides))
        return True
    if "--simulate" in words:
        words += SMALL_SIMULATION
    if "--total-gpus" in words:
        words[words.index("--total-gpus") + 1] = FEW_GPUS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"dapo-mega {words[1]}", *words[2:]])
        try:
            importlib.import_module(f"dapo_mega.commands.{words[1].replace('-', '_')}").main()
        except SystemExit as left:
            if left.code == 2:  # There is no such argument.
                raise AssertionError(command) from left
    return True


@pytest.mark.parametrize("name", NAMES)
def test_commands_run_as_shown_or_say_what_they_need(name, elsewhere):
    for marker, commands in blocks(name):
        if marker is None:
            for command in commands:
                with contextlib.redirect_stdout(io.StringIO()):
                    ran = run_shown(command)
                assert ran, (
                    f"{command!r} is run by nothing here; mark its block <!-- needs ... --> or <!-- run by ... -->"
                )
        elif marker.startswith("run by "):
            test = (PROJECT / marker.removeprefix("run by ")).read_text()
            scripts = re.findall(r"[a-z_]+\.(?:sh|py)", " ".join(commands))
            assert any(script in test for script in scripts), f"{marker}: it does not mention {scripts}"
        else:
            assert marker.startswith("needs "), f"{name}: unknown marker {marker!r}"
            check_names(commands)


def check_names(commands):
    """Commands that cannot run here name scripts, commands and tests that exist, and are valid shell."""
    text = "\n".join(commands)
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=20).returncode == 0, text
    for path in re.findall(r"\b(?:launch|tools|configs|tests)/[\w./-]+\.(?:py|sh|yaml|json|sbatch)\b", text):
        assert (PROJECT / path).is_file(), path
    for command in re.findall(r"(?:^|[\s;&|(])dapo-mega (\w[\w-]*)", text):
        assert command in COMMANDS, command
