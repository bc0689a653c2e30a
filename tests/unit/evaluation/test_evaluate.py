"""Evaluations of a model on benchmarks: what they come to, that they continue exactly, and what they refuse."""

import fcntl
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dapo_mega.checkpoints.folders import write_manifest
from dapo_mega.commands import convert, evaluate, prepare, show_samples
from dapo_mega.data import load_tokenizer
from dapo_mega.engines.lockstep import LockstepLoop
from dapo_mega.engines.protocol import Generation
from dapo_mega.errors import InputError
from dapo_mega.evaluation import held_out
from dapo_mega.evaluation.benchmarks import sources
from dapo_mega.evaluation.choices import Choices
from dapo_mega.evaluation.model_folder import open_model
from dapo_mega.evaluation.results import results_table
from dapo_mega.evaluation.run import Engine, Evaluation
from dapo_mega.evaluation.run import evaluate as run_evaluation
from dapo_mega.types import GenerationFailure, Response

NUM_PROBLEMS, K, PART = 5, 3, 4
SAMPLES = Path("samples") / "evaluation_00000000.parquet"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = "--hidden-size 16 --layers 1 --heads 2 --kv-heads 1 --intermediate-size 16 --max-positions 512"
    prepare.main(["init-model", "--output", str(folder), "--tokenizer", "byte", *sizes.split()])
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Problem i of GSM8K has the answer i, and that of MATH-500 i + 1/2."""
    folder = tmp_path_factory.mktemp("data")
    gsm8k = [{"question": f"What is {i} + 0?", "answer": f"It is {i}. #### {i}"} for i in range(NUM_PROBLEMS)]
    math500 = [{"problem": f"What is {i} + 1/2?", "answer": f"\\frac{{{2 * i + 1}}}{{2}}"} for i in range(2)]
    for name, rows in (("gsm8k_test", gsm8k), ("MATH-500", math500)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Interrupted(Exception):
    pass


class ScriptedSampler:
    """Says `says(problem, sample)` as tokens; a response that does not end in ! is cut off. Remembers what it was
    asked, answers the last part first, and stops after `num_parts`."""

    engines = ("scripted",)
    most_open = NUM_PROBLEMS * K

    def __init__(self, model, says, num_parts=None, fails=()):
        self._tokenizer = load_tokenizer(str(model))
        self._says, self._num_parts, self._fails = says, num_parts, fails
        self.asked = []
        self._open = {}
        self._loop = LockstepLoop(self._step)

    def generate(self, request):
        generation = self._open[request.request_id] = Generation(request, self._loop)
        return generation

    def run(self, work):
        return self._loop.complete(work)

    def _step(self):
        if self._num_parts == 0:
            raise Interrupted
        if self._num_parts is not None:
            self._num_parts -= 1
        last = (max(self._open) - (1 << 62)) // PART
        for number in [number for number in self._open if (number - (1 << 62)) // PART == last]:
            generation = self._open.pop(number)
            generation.answer(self._answer(generation.request))
        return True

    def _answer(self, request):
        index = request.request_id - (1 << 62)
        self.asked.append(index)
        if index in self._fails:
            return GenerationFailure(request.request_id, "no engine")
        text = self._says(*divmod(index, K))
        ids = np.array(self._tokenizer(text.rstrip("!"), add_special_tokens=False)["input_ids"], np.int32)
        finish = "length"
        if text.endswith("!"):
            ids, finish = np.append(ids, np.int32(self._tokenizer.eos_token_id)), "stop"
        return Response(request.request_id, ids, np.zeros(len(ids), np.float32), finish, 0)

    def close(self):
        self._loop.shut()


def right_twice(problem, sample):
    """Right in two of three, in two spellings; but the last problem is never solved, and once not answered."""
    if problem == NUM_PROBLEMS - 1:
        return ("Answer: 77!", "I do not know", "Answer: 78!")[sample]
    return (f"Answer: {problem}!", f"so \\boxed{{{problem}.0}}!", "Answer: 99!")[sample]


def evaluation(model, data, output, sampler, **choices):
    engine = Engine({"kind": "scripted"}, PART, lambda config, prompts: sampler)
    chosen = Choices(**{"samples": K, "max_tokens": 32, **choices})
    return Evaluation(open_model(model, None, output), sources(["gsm8k"], data), chosen, "fp32", engine, output)


def files_of(output):
    return [(output / name).read_bytes() for name in (Path("gsm8k") / SAMPLES, Path("results.json"))]


@pytest.fixture(scope="module")
def uninterrupted(model, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    run_evaluation(evaluation(model, data, output, ScriptedSampler(model, right_twice)))
    return output


def test_results_hold_every_measure_with_its_interval(uninterrupted):
    result = json.loads((uninterrupted / "results.json").read_text())["benchmarks"]["gsm8k"]
    values = {name: metric["value"] for name, metric in result["metrics"].items()}
    of_problem = [2 / 3] * 4 + [0]
    assert values["avg@3"] == pytest.approx(np.mean(of_problem))
    assert values["pass@1"] == pytest.approx(np.mean(of_problem))
    assert values["pass@2"] == values["pass@3"] == pytest.approx(0.8)
    # 2 of 3 agree on the right answer, in different words.
    assert values["maj@3"] == pytest.approx(0.8)
    assert values["truncated"] == values["no_answer"] == pytest.approx(1 / 15)
    assert all(metric["low"] <= metric["value"] <= metric["high"] for metric in result["metrics"].values())
    assert result["metrics"]["avg@3"]["low"] < values["avg@3"] < result["metrics"]["avg@3"]["high"]
    assert (result["num_responses"], result["num_failed"], result["num_unscored"]) == (15, 0, 0)
    settings = result["settings"]
    assert {
        "problems_sha256",
        "model_sha256",
        "template",
        "grader",
        "max_response_tokens",
        "versions",
    } <= settings.keys()
    assert settings["versions"].keys() >= {"torch", "transformers", "math-verify"}


def test_all_responses_are_shown_by_the_page_of_samples(uninterrupted, capsys):
    show_samples.main([str(uninterrupted / "gsm8k"), "--output", str(uninterrupted / "page.html")])
    assert "15 responses of 1 steps and evaluations" in capsys.readouterr().out


def test_a_killed_evaluation_continues_without_asking_twice(model, data, tmp_path, uninterrupted):
    for num_parts in range(4):
        output = tmp_path / str(num_parts)
        killed = ScriptedSampler(model, right_twice, num_parts=num_parts)
        with pytest.raises(Interrupted):
            run_evaluation(evaluation(model, data, output, killed))
        parts = output / "gsm8k" / "samples" / "parts"
        parts.mkdir(parents=True, exist_ok=True)
        # What a kill leaves of the file that it was writing.
        (parts / "part_000000.parquet.tmp").write_bytes(b"PAR1 and no more")
        again = ScriptedSampler(model, right_twice)
        run_evaluation(evaluation(model, data, output, again))
        assert sorted(killed.asked + again.asked) == list(range(NUM_PROBLEMS * K)), num_parts
        assert files_of(output) == files_of(uninterrupted), num_parts
        finished = ScriptedSampler(model, right_twice)
        run_evaluation(evaluation(model, data, output, finished))
        assert finished.asked == []
        assert not parts.exists()


def test_a_kill_while_parts_are_joined_loses_nothing(model, data, tmp_path, uninterrupted, monkeypatch):
    def killed(*_):
        raise Interrupted

    def killed_removal(folder, **_):
        next(folder.glob("*.parquet")).unlink()
        raise Interrupted

    places = {
        "dapo_mega.evaluation.responses.write_tables": killed,
        "pathlib.Path.rename": killed,
        "shutil.rmtree": killed_removal,
    }
    for place, replacement in places.items():
        output = tmp_path / place
        begun = evaluation(model, data, output, ScriptedSampler(model, right_twice))
        with monkeypatch.context() as patch:
            patch.setattr(place, replacement)
            with pytest.raises(Interrupted):
                run_evaluation(begun)
        again = ScriptedSampler(model, right_twice)
        run_evaluation(evaluation(model, data, output, again))
        assert again.asked == [], place
        assert files_of(output) == files_of(uninterrupted), place
        assert [path.name for path in (output / "gsm8k" / "samples").iterdir()] == [SAMPLES.name], place


def test_requests_that_failed_are_counted_and_asked_again(model, data, tmp_path, uninterrupted):
    content = run_evaluation(evaluation(model, data, tmp_path, ScriptedSampler(model, right_twice, fails=(1, 14))))
    result = content["benchmarks"]["gsm8k"]
    assert (result["num_failed"], result["num_responses"]) == (2, 13)
    # Of problem 0 one right response failed, of problem 4 a wrong one.
    assert result["metrics"]["avg@2"]["value"] == pytest.approx((1 / 2 + 3 * 2 / 3 + 0) / 5)
    note = results_table(content).splitlines()[-1]
    assert note.startswith("note: gsm8k: 2 of 15 responses are in no measure (2 without a response")
    assert "leaves 0 of 5 problems out" in note
    again = ScriptedSampler(model, right_twice)
    run_evaluation(evaluation(model, data, tmp_path, again))
    assert sorted(again.asked) == [1, 14]
    assert files_of(tmp_path) == files_of(uninterrupted)


def test_a_larger_k_asks_only_for_the_responses_that_are_missing(model, data, tmp_path, uninterrupted, monkeypatch):
    earlier = pq.read_table(uninterrupted / "gsm8k" / SAMPLES)
    whole = tmp_path / "whole"
    shutil.copytree(uninterrupted, whole)
    sampler = ScriptedSampler(model, lambda problem, sample: "Answer: 5!")
    content = run_evaluation(evaluation(model, data, whole, sampler, samples=5))
    assert sorted(sampler.asked) == [5 * problem + sample for problem in range(NUM_PROBLEMS) for sample in (3, 4)]
    assert content["benchmarks"]["gsm8k"]["settings"]["k"] == 5
    table = pq.read_table(whole / "gsm8k" / SAMPLES)
    first = 1 << 62
    assert table["request_id"].to_pylist() == list(range(first, first + 5 * NUM_PROBLEMS))
    assert table["group"].to_pylist() == [first + 5 * (i // 5) for i in range(5 * NUM_PROBLEMS)]
    kept = table.filter([i % 5 < 3 for i in range(len(table))])
    for column in ("prompt_index", "response", "correct", "answer", "token_ids"):
        assert kept[column].to_pylist() == earlier[column].to_pylist(), column
    # Killed before the first new response, while they come, and while the old ones are spread over parts.
    for num_parts in (0, 2, None):
        output = tmp_path / str(num_parts)
        shutil.copytree(uninterrupted, output)
        killed = ScriptedSampler(model, lambda problem, sample: "Answer: 5!", num_parts=num_parts)
        begun = evaluation(model, data, output, killed, samples=5)
        with monkeypatch.context() as patch:
            if num_parts is None:
                patch.setattr("dapo_mega.evaluation.responses.np.searchsorted", _killed)
            with pytest.raises(Interrupted):
                run_evaluation(begun)
        again = ScriptedSampler(model, lambda problem, sample: "Answer: 5!")
        if num_parts is not None:
            with pytest.raises(InputError, match="k was 5 and is 6"):  # Only what is whole may grow.
                run_evaluation(evaluation(model, data, output, again, samples=6))
        run_evaluation(evaluation(model, data, output, again, samples=5))
        assert sorted(killed.asked + again.asked) == sorted(sampler.asked), num_parts
        assert files_of(output) == files_of(whole), num_parts


def _killed(*_):
    raise Interrupted


def test_an_evaluation_is_not_continued_with_other_settings(model, data, tmp_path, uninterrupted):
    other_data = tmp_path / "data"
    other_data.mkdir()
    for file in data.iterdir():
        (other_data / file.name).write_text(file.read_text().replace("+ 0?", "- 0?"))
    begun = evaluation(model, data, uninterrupted, None)
    cases = [
        (replace(begun, choices=replace(begun.choices, samples=2)), "k was 3 and is 2"),
        (replace(begun, choices=replace(begun.choices, temperature=0.5)), "temperature was 1.0 and is 0.5"),
        (replace(begun, choices=replace(begun.choices, seed=1)), "seed was 0 and is 1"),
        (replace(begun, choices=replace(begun.choices, template="r1")), "template was dapo and is r1"),
        (replace(begun, choices=replace(begun.choices, extraction="boxed")), "grader.extraction was auto and is boxed"),
        (replace(begun, choices=replace(begun.choices, max_tokens=33)), "max_response_tokens was 32 and is 33"),
        (replace(begun, choices=replace(begun.choices, num_problems=2)), "num_problems was 5 and is 2"),
        (replace(begun, dtype="bf16"), "dtype was fp32 and is bf16"),
        (replace(begun, sources=sources(["gsm8k"], other_data)), "problems_sha256 was"),
        (replace(begun, engine=replace(begun.engine, settings={"kind": "embedded"})), "engine.kind was scripted"),
    ]
    for changed, difference in cases:
        with pytest.raises(InputError, match=f"{difference}.*give another --output"):
            run_evaluation(changed)
    prepare.main(["init-model", "--output", str(tmp_path / "other"), "--tokenizer", "byte", "--seed", "1"])
    with pytest.raises(InputError, match=r"results of another model on gsm8k .*give another --output"):
        run_evaluation(evaluation(tmp_path / "other", data, uninterrupted, None))


def test_what_is_on_disk_is_not_mixed_with_what_it_does_not_belong_to(model, data, tmp_path):
    with pytest.raises(Interrupted):
        run_evaluation(evaluation(model, data, tmp_path, ScriptedSampler(model, right_twice, num_parts=2)))
    again = evaluation(model, data, tmp_path, ScriptedSampler(model, right_twice))
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another evaluation writes into"):
            run_evaluation(again)
    part = next((tmp_path / "gsm8k" / "samples" / "parts").glob("*.parquet"))
    content = part.read_bytes()
    part.write_bytes(content[:100])
    with pytest.raises(InputError, match=f"{part} cannot be read .*remove it and start again"):
        run_evaluation(again)
    part.write_bytes(content)
    (tmp_path / "gsm8k" / "settings.json").unlink()
    with pytest.raises(InputError, match=r"holds responses, but no settings\.json"):
        run_evaluation(again)


def test_a_chat_template_is_used_if_there_is_one_unless_it_is_switched_off(model, data, tmp_path, capsys):
    chat = tmp_path / "chat"
    shutil.copytree(model, chat)
    (chat / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply{{ how }}>"
    )
    prompts = {}
    for name, chosen, given in (("auto", None, {}), ("off", False, {}), ("argument", True, {"how": " soon"})):
        choices = {"chat_template": chosen, "template_arguments": given, "num_problems": 1}
        run_evaluation(evaluation(chat, data, tmp_path / name, ScriptedSampler(chat, right_twice), **choices))
        prompts[name] = pq.read_table(tmp_path / name / "gsm8k" / SAMPLES)["prompt"][0].as_py()
    assert prompts["auto"] == f"<user>{prompts['off']}<reply>"
    assert prompts["argument"] == f"<user>{prompts['off']}<reply soon>"
    assert "Solve the following math problem" in prompts["off"]
    shown = capsys.readouterr().out
    assert "through the tokenizer's chat template (the tokenizer has a chat template)" in shown
    assert "as plain text\n" in shown


def test_greedy_evaluations_ask_once_and_long_contexts_have_a_usual_limit():
    (source,) = sources(["aime24"])
    assert Choices(temperature=0.0).samples_of(source) == 1
    assert Choices().samples_of(source) == 32
    assert [Choices().max_tokens_of(context) for context in (512, 4096, 32768)] == [384, 3072, 8192]


def start(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dapo-mega evaluate", *map(str, arguments)])
    monkeypatch.setattr("dapo_mega.commands.evaluate.leave_at_sigterm", lambda message: None)
    evaluate.main()


def test_the_same_seed_gives_the_same_files_in_any_order_of_benchmarks(model, data, tmp_path, monkeypatch, capsys):
    common = ["--data", data, "--max-tokens", "16", "--k", "2", "--batch-rows", "3"]
    for name, benchmarks, seed in (("a", "gsm8k,math500", 0), ("b", "math500,gsm8k", 0), ("c", "gsm8k,math500", 1)):
        start(monkeypatch, model, "--benchmarks", benchmarks, "--output", tmp_path / name, "--seed", seed, *common)
    shown = capsys.readouterr().out
    assert "prompts: template dapo, as plain text (the tokenizer has no chat template)" in shown
    assert "gsm8k: 5 problems of" in shown
    a, b, c = ([(tmp_path / name / part / SAMPLES).read_bytes() for part in ("gsm8k", "math500")] for name in "abc")
    assert a == b
    assert a[0] != c[0]
    assert (tmp_path / "a" / "results.json").read_bytes() == (tmp_path / "b" / "results.json").read_bytes()


def test_benchmarks_are_added_to_a_folder_one_after_the_other(model, data, tmp_path, monkeypatch):
    common = ["--data", data, "--max-tokens", "8", "--k", "1", "--output", tmp_path / "out"]
    for benchmark in ("math500", "gsm8k"):
        start(monkeypatch, model, "--benchmarks", benchmark, *common)
    assert list(json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]) == ["math500", "gsm8k"]


def test_checkpoints_of_a_run_are_evaluated_as_what_they_were_converted_from(
    model, data, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    for step in (3, 12):
        folder = run / "checkpoints" / f"step_{step:08d}"
        convert.main(["hf-to-megatron", str(model), str(folder)])
        write_manifest(folder)
    common = ["--benchmarks", "gsm8k", "--data", data, "--max-tokens", "8", "--k", "1"]
    given = {
        "model": [model],
        "run": [run, "--step", "3"],
        "newest": [run],
        "checkpoint": [run / "checkpoints" / "step_00000012"],
    }
    for name, arguments in given.items():
        start(monkeypatch, *arguments, "--output", tmp_path / name, *common)
    shown = capsys.readouterr().out
    assert shown.count("step_00000012 is evaluated as") == 2
    tokens = [pq.read_table(tmp_path / name / "gsm8k" / SAMPLES)["token_ids"] for name in given]
    assert all(found.equals(tokens[0]) for found in tokens)
    assert not list(tmp_path.rglob("converted_model*"))
    with pytest.raises(InputError, match=r"no complete checkpoint of step 4, only of 3, 12; give one of them"):
        start(monkeypatch, run, "--step", "4", *common)


def test_engines_that_the_command_starts_sample_by_seeds_unless_they_must_not():
    asked = ["m", "--benchmarks", "gsm8k", "--engine", "sglang"]
    seeds = "--enable-deterministic-inference"
    assert evaluate.parse_arguments(asked).extra == (seeds,)
    assert evaluate.parse_arguments([*asked, "--", "--tp", "2", seeds]).extra == ("--tp", "2", seeds)
    assert evaluate.parse_arguments([*asked, "--no-deterministic", "--", "--tp", "2"]).extra == ("--tp", "2")
    with pytest.raises(InputError, match=r"--no-deterministic .* add --engine sglang"):
        evaluate.parse_arguments(["m", "--benchmarks", "gsm8k", "--no-deterministic"])


def test_the_folder_of_a_runs_results_is_made_before_anything_is_asked(tmp_path, monkeypatch):
    file = tmp_path / "of mine" / "trained.json"
    asked = {"evaluation/k": 1.0}
    monkeypatch.setattr("dapo_mega.config.load_config", lambda *given: None)
    monkeypatch.setattr(held_out, "evaluate_checkpoint", lambda *given: asked if file.parent.is_dir() else {})
    start(monkeypatch, "--config", "run.yaml", "--output", file)
    assert json.loads(file.read_text()) == asked
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_cannot_be_evaluated_is_one_line(model, data, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\0" * 16)
    (tmp_path / "empty").mkdir()
    of_data = ["--benchmarks", "gsm8k", "--data", data, "--output", tmp_path / "out"]
    cases = [
        ([], "takes one MODEL, and none is given"),
        ([model, "seed=1", *of_data], "takes one MODEL, and 2 are given; overrides .* need --config"),
        ([model], "no benchmark is given; choose of aime24"),
        ([*of_data, "--config", "run.yaml"], "--config excludes --benchmarks, --data: the run's file decides"),
        (["--config", "run.yaml", "--k", "4", "--seed", "1"], "--config excludes --k, --seed: the run's file decides"),
        ([model, *of_data, "--samples", tmp_path], "--samples is for --config"),
        (["--config", "run.yaml", "--output", tmp_path], "is a folder; with --config the results are one file"),
        ([tmp_path / "absent", *of_data], "absent is not a folder; give a Hugging Face checkpoint, a run's folder"),
        ([tmp_path / "empty", *of_data], "holds neither config.json nor checkpoints"),
        ([broken, *of_data], "model.safetensors"),
        ([model, *of_data, "--step", "3"], "--step is for a run's folder"),
        ([model, *of_data, "--max-tokens", "512"], "leaves prompts no room in the model's context of 512 tokens"),
        ([model, *of_data, "--max-tokens", "400"], r"gsm8k: .*\.jsonl, line 1: .* give --max-tokens \d+ or less"),
        ([model, *of_data, "--temperature", "0", "--k", "2"], "gives one response 2 times"),
        ([model, *of_data, "--top-p", "2"], "evaluation.top_p"),
        ([model, *of_data, "--template", "dappo"], "did you mean 'dapo'"),
        ([model, *of_data, "--chat-template", "on"], "the tokenizer has no chat template"),
        ([model, *of_data, "--urls", "http://x", "--engine", "embedded"], "leave one of them out"),
        ([model, *of_data, "--num-engines", "2"], "add --engine sglang, without --urls"),
        ([model, *of_data, "--", "--tp", "2"], "add --engine sglang, without --urls"),
        ([model, *of_data, "--engine", "sglang", "--python", tmp_path / "none"], "cannot be started"),
    ]
    for arguments, message in cases:
        with pytest.raises(InputError, match=message) as refused:
            start(monkeypatch, *arguments)
        assert "\n" not in str(refused.value), arguments
    assert not list((tmp_path / "out").rglob("*.parquet"))
