"""Comparisons of saved evaluations whose answers are known."""

from random import Random

import pytest

from dapo_mega.errors import InputError
from dapo_mega.evaluation.comparison import compare
from dapo_mega.evaluation.comparison_text import as_text, as_values
from dapo_mega.evaluation.saved import load_evaluations
from tests.unit.evaluation.made_evaluations import SETTINGS, save


def compared(*folders, **options):
    (comparison,) = compare(load_evaluations([str(folder) for folder in folders]), **options)
    return comparison


@pytest.fixture
def crossing(tmp_path):
    """The base solves every problem once in 16 responses, so its pass@k is k/16. The trained model always solves every
    other problem, and the rest never: pass@k is 1/2. They meet at k = 8."""

    def make(num_problems):
        base = save(tmp_path / f"base{num_problems}", [1] * num_problems, 16)
        return base, save(tmp_path / f"dapo{num_problems}", [16, 0] * (num_problems // 2), 16)

    return make


def test_differences_are_paired_by_problem(tmp_path):
    # Seven problems: the trained model wins five of them by one response in four, and ties the others.
    base = save(tmp_path / "base", [0, 0, 1, 1, 2, 4, 0], 4)
    trained = save(tmp_path / "dapo", [1, 1, 2, 2, 3, 4, 0], 4)
    comparison = compared(base, trained)
    found = comparison.against_base["dapo"].differences["avg@4"]
    assert (comparison.base, comparison.num_problems, comparison.ks) == ("base", 7, (1, 2, 4))
    assert found.mean.value == pytest.approx(5 * 0.25 / 7)
    assert 0 < found.mean.low < found.mean.value < found.mean.high <= 0.25
    assert (found.won, found.lost, found.p_value) == (5, 0, pytest.approx(2 / 32))
    lengths = comparison.measures["base"]["length"]
    assert lengths.value == pytest.approx((8 * 28 - 4 * 8) / 28)
    assert comparison.measures["dapo"]["pass@4"].value == pytest.approx(6 / 7)


def test_a_crossing_is_found_at_its_k_and_stated_with_whether_it_is_more_than_noise(crossing):
    comparison = compared(*crossing(20))
    against = comparison.against_base["dapo20"]
    (found,) = against.crossings
    assert (found.k, found.behind_before, found.last_before, found.first_after) == (9, "base", 4, 16)
    assert found.is_separated
    text = as_text(comparison)
    assert "dapo20 and base20 cross at k = 9: below dapo20 is ahead, from there on base20." in text
    assert "the intervals separate on both sides, so the crossing is more than noise" in text
    (noisy,) = compared(*crossing(4)).against_base["dapo4"].crossings
    assert (noisy.k, noisy.is_separated) == (9, False)
    assert "do not separate" in as_text(compared(*crossing(4)))


def test_the_base_may_be_overtaken_too(crossing):
    base, trained = crossing(20)
    (found,) = compared(trained, base).against_base["base20"].crossings
    assert (found.k, found.behind_before) == (9, "model")


def test_curves_that_do_not_cross_are_said_not_to(tmp_path):
    base = save(tmp_path / "base", [1] * 8, 8)
    trained = save(tmp_path / "dapo", [4] * 8, 8)
    assert compared(base, trained).against_base["dapo"].crossings == ()
    assert "No crossing up to k = 8: dapo is ahead up to k = 4, beyond both are equal." in as_text(
        compared(base, trained)
    )


def test_nobody_is_ahead_by_what_may_be_chance(tmp_path):
    base = save(tmp_path / "base", [2] * 40, 4)
    trained = save(tmp_path / "dapo", [2] * 38 + [3, 1], 4)
    text = as_text(compared(base, trained))
    assert "these responses do not show which is better" in text
    assert "ahead" not in text


def test_flipped_bits_of_saved_responses_are_noticed(tmp_path):
    base, trained = save(tmp_path / "base", [1] * 8, 8), save(tmp_path / "dapo", [4] * 8, 8)
    (file,) = trained.rglob("*.parquet")
    whole, expected = file.read_bytes(), as_text(compared(base, trained))
    random = Random(0)
    for _ in range(40):
        content = bytearray(whole)
        content[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
        try:
            said = as_text(compared(base, trained))
        except InputError as error:
            said = str(error)
        assert said == expected or str(file) in said


def test_the_sampling_gap_is_the_bases_largest_pass_at_k_minus_the_models_pass_at_1(crossing):
    against = compared(*crossing(20)).against_base["dapo20"]
    assert against.sampling_gap.value == pytest.approx(1.0 - 0.5)
    assert against.sampling_gap.low < 0.5 < against.sampling_gap.high


def test_coverage_is_told_by_the_bases_success_rate_with_problems_won_and_lost(tmp_path):
    base = save(tmp_path / "base", [0, 0, 1, 5, 10], 10)
    trained = save(tmp_path / "dapo", [3, 0, 0, 10, 10], 10)
    other = save(tmp_path / "grpo", [0, 0, 2, 5, 10], 10)
    comparison = compared(base, trained, other)
    shown = [(group.name, group.num_problems, group.solved["dapo"]) for group in comparison.difficulty]
    assert shown == [("never", 2, 0.5), ("up to 10%", 1, 0.0), ("25% to 50%", 1, 1.0), ("75% to 100%", 1, 1.0)]
    assert comparison.difficulty[0].success_rate == {"base": 0.0, "dapo": pytest.approx(0.15), "grpo": 0.0}
    against = comparison.against_base["dapo"]
    assert [(problem.index, problem.model_correct) for problem in against.newly_solved] == [(0, 3)]
    assert [(problem.index, problem.base_correct) for problem in against.no_longer_solved] == [(2, 1)]
    assert comparison.against_base["grpo"].newly_solved == ()
    text = as_text(comparison)
    assert "dapo solves 1 problem that base never does:\n  problem 0 (dapo 3 of 10, base 0 of 10): What is 0?" in text
    assert "base solves 1 problem that dapo never does:\n  problem 2 (dapo 0 of 10, base 1 of 10)" in text
    assert "grpo solves no problem that base never does." in text
    assert as_values(comparison)["against_base"]["dapo"]["newly_solved"][0]["ground_truth"] == "0"


def test_different_k_are_compared_up_to_the_smaller_one(tmp_path):
    base, trained = save(tmp_path / "base", [2, 1], 8), save(tmp_path / "dapo", [2, 1], [4, 5])
    comparison = compared(base, trained)
    assert comparison.ks == (1, 2, 4)
    (note,) = (note for note in comparison.notes if "lacks" not in note)
    assert note.startswith("responses per problem differ (base 8, dapo 4 to 5): the first to each problem are compared")
    # The first four and five responses of both are alike, so nothing differs.
    assert {found.mean.value for found in comparison.against_base["dapo"].differences.values()} == {0.0}
    assert comparison.measures["base"]["avg@4"].value == pytest.approx((2 / 4 + 1 / 5) / 2)
    assert compared(base, trained, ks=[3, 1]).ks == (1, 3)


MISSING = [
    # Responses to each problem of base and model; problems that are compared; what is said.
    ([4, 4, 4], [4, 4, 4], 3, []),
    ([4, 4, 4], [4, 0, 4], 2, ["dapo lacks 4 responses", "1 of 3 problems; compared are the 2"]),
    ([0, 4, 4], [4, 0, 4], 1, ["base lacks 4 responses", "dapo lacks 4 responses", "compared are the 1"]),
    ([4, 4, 4], [4, 3, 4], 3, ["dapo lacks 1 responses", "0 of 3 problems"]),
    ([4, 4, 4], [4, 4, 0], 2, ["dapo lacks 4 responses", "1 of 3 problems"]),
]


@pytest.mark.parametrize("words", [None, ["a?", "b?", "c?"]])
def test_missing_responses_are_said_and_only_problems_that_all_have_are_compared(tmp_path, words):
    settings = {**SETTINGS, "k": 4, "num_problems": 3}
    for number, (of_base, of_model, num_compared, said) in enumerate(MISSING):
        # Both are right in all responses, so that nothing differs unless what is missing counts as wrong.
        base = save(tmp_path / f"{number}" / "base", of_base, of_base, settings=settings)
        model = save(tmp_path / f"{number}" / "dapo", of_model, of_model, settings=settings, prompts=words)
        comparison = compared(base, model, allowed=["template"])
        notes = " ".join(comparison.notes)
        assert comparison.num_problems == num_compared, number
        assert ("lacks" in notes, [part for part in said if part not in notes]) == (bool(said), []), (number, notes)
        assert {found.mean.value for found in comparison.against_base["dapo"].differences.values()} == {0.0}, number
    with pytest.raises(InputError, match="different problem sets"):  # What was never asked is not missing.
        compared(base, save(tmp_path / "fewer", [4], 4, settings={**settings, "num_problems": 1}))


def test_problems_are_matched_by_what_was_asked_and_not_by_their_place(tmp_path):
    base = save(tmp_path / "base", [4, 0], 4, prompts=["a?", "b?"], truths=["1", "2"])
    trained = save(tmp_path / "dapo", [0, 4], 4, prompts=["b?", "a?"], truths=["2", "1"])
    assert compared(base, trained).against_base["dapo"].differences["avg@4"].mean.value == 0


def test_a_grader_that_reads_no_answers_has_no_majority(tmp_path):
    settings = {**SETTINGS, "grader": {"kind": "function", "path": "my_reward.py:score"}}
    folders = [save(tmp_path / name, [1], 4, settings=settings) for name in ("base", "dapo")]
    evaluations = load_evaluations([str(folder) for folder in folders])
    assert all(one.benchmarks["sums"].has_answers for one in evaluations)  # This one gave answers all the same.


def test_runs_are_compared_by_their_steps(tmp_path):
    run = save(tmp_path / "mine", [0, 1], 4, step=0)
    save(run, [1, 2], 4, step=10)
    save(run, [4, 4], 4, step=100)
    comparison = compared(f"{run}@0", f"{run}@10", run)
    assert list(comparison.measures) == ["mine@0", "mine@10", "mine@100"]
    assert [measures["avg@4"].value for measures in comparison.measures.values()] == [0.125, 0.375, 1.0]
    assert compared(f"{run}@0", run / "samples" / "evaluation_00000100.parquet").num_problems == 2


def test_several_benchmarks_are_compared_one_by_one(tmp_path):
    for name in ("base", "dapo"):
        for benchmark in ("aime24", "math500"):
            save(tmp_path / name / benchmark, [1, 2], 4, source=benchmark)
    save(tmp_path / "dapo" / "extra", [1], 4, source="extra")
    evaluations = load_evaluations([str(tmp_path / "base"), str(tmp_path / "dapo")])
    with pytest.raises(InputError, match=r"base has no evaluation of 'extra' \(base: aime24, math500; dapo: aime24"):
        compare(evaluations)
    assert [one.name for one in compare(evaluations, only=["math500", "aime24"])] == ["math500", "aime24"]


REFUSED_SETTINGS = [
    ("template", "template", "r1", "different template: base has template='dapo', dapo has template='r1'"),
    ("budget", "max_response_tokens", 128, "different budget: base has max_response_tokens=64, dapo has"),
    ("sampling", "temperature", 0.6, "different sampling: base has temperature=1.0, dapo has temperature=0.6"),
    ("sampling", "top_p", 1.0, "different sampling: base has top_p=0.7, dapo has top_p=1.0"),
    ("grader", "grader", {"kind": "answer", "extraction": "boxed"}, "different grader: base has grader="),
]


def test_different_settings_are_refused_by_name_unless_allowed(tmp_path):
    base = save(tmp_path / "base", [1, 2], 4)
    for group, key, value, message in REFUSED_SETTINGS:
        trained = save(tmp_path / "dapo", [1, 2], 4, settings={**SETTINGS, key: value})
        with pytest.raises(InputError, match="sums: different") as refused:
            compared(base, trained)
        assert str(refused.value).startswith(f"sums: {message}"), str(refused.value)
        assert str(refused.value).endswith(f"--allow-different {group} compares them nevertheless")
        (note,) = compared(base, trained, allowed=[group]).notes
        assert note.startswith(message), note
    save(tmp_path / "dapo", [1, 2], 4, settings={**SETTINGS, "model": "other", "seed": 1})
    assert compared(base, trained).notes == ()


def test_unknown_settings_are_said_to_be_unknown(tmp_path):
    base, trained = save(tmp_path / "base", [1], 4, settings=None), save(tmp_path / "dapo", [1], 4)
    (note,) = compared(base, trained).notes
    assert note.startswith("base does not say its settings")


def test_different_problems_prompts_and_answers_are_refused_by_name(tmp_path):
    base = save(tmp_path / "base", [1, 2], 4, prompts=["Solve: 1+1", "Solve: 1+2"], truths=["2", "3"])
    for prompts, truths, message in (
        (
            ["Solve: 1+1", "Solve: 7+7"],
            ["2", "14"],
            "only base has 1 of the problems ('Solve: 1+2'); only dapo has 1",
        ),
        (["Solve: 1+1"], ["2"], "different problem sets: only base has 1 of the problems ('Solve: 1+2')"),
        (["Solve: 1+1", "Solve: 1+2"], ["2", "4"], "ground truths: the answer of 'Solve: 1+2' is '3' in base, '4'"),
        (["1+1 Answer:", "1+2 Answer:"], ["2", "3"], "different template: base asks 'Solve: 1+1', dapo asks '1+1 An"),
    ):
        trained = save(tmp_path / "dapo", [1] * len(prompts), 4, prompts=prompts, truths=truths)
        with pytest.raises(InputError, match="sums: different") as refused:
            compared(base, trained)
        assert message in str(refused.value), str(refused.value)
        assert "\n" not in str(refused.value)
    assert compared(base, trained, allowed=["template"]).num_problems == 2


def test_listed_problems_are_shown_without_the_instruction_that_all_have(tmp_path):
    prompts = [
        f"Solve the following math problem step by step. The last line is the answer.\n\n{i}1+1?" for i in range(3)
    ]
    base = save(tmp_path / "base", [0, 1, 1], 4, prompts=prompts)
    text = as_text(compared(base, save(tmp_path / "dapo", [1, 1, 1], 4, prompts=prompts)))
    assert "problem 0 (dapo 1 of 4, base 0 of 4): 01+1?" in text


def test_a_long_common_start_of_prompts_is_not_all_that_is_shown(tmp_path):
    start = "You are a helpful assistant. " * 20
    base = save(tmp_path / "base", [1], 4, prompts=[start + "Think. 1+1"])
    trained = save(tmp_path / "dapo", [1], 4, prompts=[start + "Box. 1+1"])
    with pytest.raises(InputError, match=r"asks '.*Think. 1\+1', dapo asks '.*Box. 1\+1'"):
        compared(base, trained)


def test_a_k_above_the_responses_there_are_is_refused(tmp_path):
    base, trained = save(tmp_path / "base", [1, 1], 8), save(tmp_path / "dapo", [1, 1], [8, 6])
    with pytest.raises(InputError, match="sums: --k 8 is more than dapo has: 6 scored responses to a problem"):
        compared(base, trained, ks=[1, 8])


def test_what_is_no_evaluation_is_refused_in_one_line(tmp_path):
    good = str(save(tmp_path / "base", [1], 4))
    step = save(tmp_path / "run", [1], 4, kind="training", step=3) / "samples" / "step_00000003.parquet"
    unjudged = save(tmp_path / "unjudged", [1], 4, judged=False)
    (tmp_path / "empty").mkdir()
    text, broken = tmp_path / "results.json", tmp_path / "samples.parquet"
    text.write_text('{"avg": 1}')
    broken.write_bytes(b"PAR1" + bytes(40))
    for given, message in (
        (str(tmp_path / "absent"), "does not exist; give the folder of a run"),
        (str(tmp_path / "empty"), "holds no saved evaluation"),
        (f"{good}@7", "holds no evaluation after step 7; there are 0"),
        (f"{good}@last", "after @ stands the step of an evaluation"),
        (str(step), "holds the groups of a training step"),
        (str(unjudged), "no response was judged right or wrong"),
        (str(text), "results.json cannot be read"),
        (str(broken), "samples.parquet cannot be read"),
        (good, "is compared with itself"),
    ):
        with pytest.raises(InputError) as refused:
            compare(load_evaluations([good, given]))
        assert message in str(refused.value), str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="at least two evaluations"):
        compare(load_evaluations([good]))
