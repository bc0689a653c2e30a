"""GeneralPoints: every formula judged exactly and by the paper's rewards, all deals solved, no deal on both sides."""

from collections import Counter
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dapo_mega.commands import prepare
from dapo_mega.config import RunConfig, SftConfig, load_config
from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.data.general_points import (
    ALPHABET,
    PointsTask,
    answer_text,
    prompt_text,
    solutions,
    values_of,
)
from dapo_mega.environments.general_points import GeneralPoints, read_formula, verify
from dapo_mega.errors import InputError
from dapo_mega.planning.dry_run import print_dry_run

CARDS = (3, 10, 12, 1)  # 3, 10, Q and A


def begun(style="paper", cards=CARDS, face_cards="ten", target=24, **settings):
    environment = GeneralPoints(prompt_style=style, **settings)
    fields = {"cards": list(cards), "face_cards": face_cards, "target": target}
    assert environment.reset({"prompt": "", "fields": fields}, 7) is None
    return environment


def said(environment, text, turn=0):
    return environment.step({"text": text, "finish_reason": "stop", "turn": turn, "token_ids": [1]})


def test_each_kind_of_answer_earns_the_papers_reward_and_says_why():
    # 3, 10, 10 and 1 under the rule `ten`.
    expected = {
        "10+10+1+3": (5, "right", ""),  # It does equal 24.
        "3*10-10-1": (-1, "wrong_value", "does not equal 24"),
        "3*10-12+1": (-2, "wrong_numbers", "not on the cards: [12]"),
        "12*2": (-2, "wrong_numbers", "[2, 12]"),
        "10+10+3+1+1": (-3, "illegal", "too many times: [1]"),
        "10+10+3": (-3, "illegal", "did not use these numbers: [1]"),
        "10/(3-3)": (-3, "illegal", "divides by zero"),
        "10+10+": (-3, "illegal", "no formula"),
        "": (-3, "illegal", "no formula"),
    }
    for formula, (reward, kind, why) in expected.items():
        for turn in (0, 3):
            seen = said(begun(), f'{{"cards": ["A"], "formula": "{formula}=24"}}', turn)
            assert (seen["reward"], seen["done"], seen["correct"]) == (reward, kind == "right", kind == "right"), (
                formula
            )
            assert {name for name, value in seen["parts"].items() if value} == {kind, "answers"}, formula
            assert why in seen["text"], formula
            assert bool(seen["text"]) == (kind != "right"), formula


def test_who_uses_up_all_answers_gets_one_less_and_no_message():
    for max_answers in (1, 5):
        last = said(begun(max_answers=max_answers), "nothing", max_answers - 1)
        assert (last["reward"], last["done"], last["correct"], last["text"]) == (-4, True, False, "")
        right = said(begun(max_answers=max_answers), '{"formula": "10+10+1+3"}', max_answers - 1)
        assert (right["reward"], right["done"], right["correct"]) == (5, True, True)


def test_the_rule_decides_what_face_cards_count_as_and_the_row_decides_the_rule():
    formula = '{"formula": "(12-10)*(3-1)=4"}'
    assert said(begun(face_cards="distinct", target=4), formula)["reward"] == 5
    assert said(begun(face_cards="ten", target=4), formula)["reward"] == -2
    assert said(begun(face_cards="distinct"), formula)["reward"] == -1
    assert values_of((1, 10, 11, 12, 13), "ten") == (1, 10, 10, 10, 10)
    assert values_of((1, 10, 11, 12, 13), "distinct") == (1, 10, 11, 12, 13)


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ('{"number": [3], "formula": "(3+1)*6=24"}', "(3+1)*6"),
        ('I think.\n```json\n{"formula": "3×8 = 24"}\n```', "3*8"),
        ("{'cards': ['3'], 'formula': '3*8=24',}", "3*8"),
        ('{"formula": "3*8', "3*8"),
        ('{"formula": 24}', ""),
        ('{"cards": [3]}', ""),
        ("3*8", ""),
        ("{" * 100_000 + "}", ""),
        ('{"formula": ' + "[" * 100_000 + "]}", "[" * 100_000 + "]"),
    ],
)
def test_a_formula_is_read_from_json_or_what_looks_like_it(text, formula):
    assert read_formula(text, "paper") == formula


def test_only_formulas_of_numbers_and_four_operators_have_a_value():
    for formula in ("2**3", "7//2", "0x18", "3&8", "3(4)", "abs(3)", "[3]", "3 if 4 else 5", "'3'", "3.0*8",
                    "-" * 190, "(" * 99, "(" * 150 + "3" + ")" * 40, "9" * 999, "\0", "3\n8", "3,8"):  # fmt: skip
        assert verify(formula, (3, 8), 24)[0] == "illegal", formula
    for formula in ("3*8", "8 * 3", "(3)*(8)", "-(-3)*8"):
        assert verify(formula, (3, 8), 24)[0] == "right", formula
    # 8 / (3 - 8 / 3) is 23.999999999999989 in floating point.
    assert verify("8/(3-8/3)", (3, 3, 8, 8), 24)[0] == "right"


def test_a_row_without_cards_is_dealt_by_the_seed_and_shown():
    def first(seed, **settings):
        environment = GeneralPoints(**settings)
        return environment.reset({"prompt": "", "fields": {}}, seed)["text"], environment

    shown, environment = first(3, prompt_style="short", num_cards=3, target=10)
    assert shown == first(3, prompt_style="short", num_cards=3, target=10)[0]
    assert len({first(seed)[0] for seed in range(8)}) == 8
    names = shown.partition(";")[2].removesuffix("=10:").split(",")
    values = [{"A": 1, "J": 10, "Q": 10, "K": 10}.get(name) or int(name) for name in names]
    assert said(environment, solutions(values, 10)[0])["correct"]
    OwnEnvironment(path="dapo_mega.environments.general_points:GeneralPoints").try_out(2)


def test_the_solver_finds_all_that_can_be_solved_and_nothing_else():
    hands = list(combinations_with_replacement(range(1, 14), 4))
    assert len(hands) == 1820
    assert sum(bool(solutions(hand, 24)) for hand in hands) == 1362
    assert solutions((3, 3, 8, 8), 24) == ["8/(3-8/3)"]
    assert solutions((1, 5, 5, 5), 24) == ["(5-1/5)*5", "5*(5-1/5)"]
    assert solutions((1, 1, 1, 1), 24) == []
    assert solutions((2, 3), 6) == ["2*3", "3*2"]
    for hand in hands[::29]:
        for formula in solutions(hand, 24):
            assert verify(formula, hand, 24)[0] == "right", formula
            assert len(formula) < 20


def test_no_deal_is_on_both_sides_in_any_order():
    task = PointsTask(seed=5)
    splits = task.splits(3000, 234)
    hands = [{tuple(sorted(problem.deal)) for problem in part} for part in
             (splits.train + splits.both_rules, splits.in_distribution + splits.out_of_distribution)]  # fmt: skip
    assert not hands[0] & hands[1]
    for part, rule in (
        (splits.train, "ten"),
        (splits.in_distribution, "ten"),
        (splits.out_of_distribution, "distinct"),
    ):
        assert len({problem.deal for problem in part}) == len(part)
        for problem in part:
            assert problem.face_cards == rule
            assert verify(problem.solution, values_of(problem.deal, rule), 24)[0] == "right"
    assert all(max(problem.deal) > 10 for problem in splits.out_of_distribution)
    assert Counter(problem.face_cards for problem in splits.both_rules) == {"ten": 3000, "distinct": 3000}
    np.random.seed(0)  # noqa: NPY002  Global random numbers play no part.
    assert PointsTask(seed=5).splits(3000, 234) == splits
    assert PointsTask(seed=6).splits(3000, 234).train != splits.train


def test_only_the_rules_sentence_differs_between_the_rules():
    sentences = {
        "paper": ("count as '10',", "count as '11', '12', and '13', respectively,"),
        "short": ("J=10,Q=10,K=10", "J=11,Q=12,K=13"),
    }
    for style in ("paper", "short"):
        ten, distinct = (prompt_text(CARDS, rule, 24, style) for rule in ("ten", "distinct"))
        (same, _, end), (as_ten, _, also_end) = (
            distinct.partition(sentences[style][1]),
            ten.partition(sentences[style][0]),
        )
        assert (same, end) == (as_ten, also_end)
        assert end


def test_the_command_writes_rows_that_the_environment_and_both_trainings_read(tmp_path, capsys):
    arguments = ["general-points", "--num-train", "60", "--num-eval", "20", "--cards", "3", "--target", "10"]
    arguments += ["--prompt-style", "short", "--output"]
    prepare.main([*arguments, str(tmp_path / "a")])
    prepare.main([*arguments, str(tmp_path / "b")])
    names = ["train", "eval-in_distribution", "eval-out_of_distribution", "demonstrations", "warm_start"]
    tables = {name: pq.read_table(tmp_path / "a" / f"{name}.parquet").to_pylist() for name in names}
    assert tables == {name: pq.read_table(tmp_path / "b" / f"{name}.parquet").to_pylist() for name in names}
    assert [len(tables[name]) for name in names] == [60, 20, 20, 60, 240]
    answers = {row["prompt"]: row["response"] for row in tables["demonstrations"]}
    for row in tables["train"]:
        environment = GeneralPoints(prompt_style="short")
        environment.reset({"prompt": row["prompt"], "fields": row}, 0)
        assert said(environment, answers[row["prompt"]])["reward"] == 5
        assert set(row["prompt"] + answers[row["prompt"]]) <= set(ALPHABET)
    assert "60 deals to train on, 20 held out" in capsys.readouterr().out
    prepare.main(["init-model", "--output", str(tmp_path / "m"), "--tokenizer", str(tmp_path / "a" / "tokenizer")])
    assert f"{len(ALPHABET) + 4} tokens" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"999 deals of 3 cards for 10 to train on asked for; there are \d+ beside"):
        PointsTask(3, 10).splits(999, 10)
    with pytest.raises(InputError, match="deals of 5 cards: give 2 to 4"):
        PointsTask(5)


def test_a_papers_answer_is_json_whose_formula_is_right():
    problem = PointsTask().splits(1, 1).out_of_distribution[0]
    environment = begun(cards=problem.deal, face_cards="distinct")
    assert said(environment, answer_text(problem, 24, "paper"))["reward"] == 5


@pytest.mark.parametrize("name", ["rl", "sft", "paper", "paper_sft"])
def test_the_recipes_files_are_valid(name, capsys):
    file = Path(__file__).parents[3] / "configs" / "recipes" / "general_points" / f"{name}.yaml"
    print_dry_run(load_config(SftConfig if "sft" in name else RunConfig, file), elsewhere=True)
    assert "dry run: the configuration is valid" in capsys.readouterr().out
