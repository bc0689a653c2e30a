"""A generative judge: what it is asked, and which of its answers are verdicts."""

from functools import partial

import pytest
from aiohttp import web

from dapo_mega.config import RunConfig, dump_config
from dapo_mega.config.components import JudgeComponent
from dapo_mega.config.files import configured, validated
from dapo_mega.errors import InputError
from dapo_mega.rewards.build import make_reward
from dapo_mega.rewards.judge import JudgeReward, filled, shortened
from dapo_mega.rewards.records import RewardRecord, Score, ScoringFailure
from tests.unit.rewards.growth import growing_too_fast
from tests.unit.rewards.local_server import serving


def record(response="good", prompt="p", **fields):
    return RewardRecord(prompt, (), response, (), "stop", "42", "math", fields)


def completion(text, finish_reason="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}


def judged(answer, given=None, **settings):
    """The result for one record and the requests, from a judge whose answer is this body."""
    seen = []

    async def serve(request):
        seen.append((request.path, await request.json()))
        return web.json_response(answer)

    with serving(serve) as url:
        judge = JudgeComponent(urls=(f"{url}/v1/",), attempts=1, timeout_s=60.0, model="m", **settings)
        results = JudgeReward(judge).score([given or record()])
    return results[0], seen


def test_the_judge_is_asked_in_the_words_of_the_template():
    result, [(path, body)] = judged(completion("Fine.\nScore: 7"), correct_from=6, system_prompt="You are strict.")
    assert result == Score(0.7, True, {"judge_score": 7.0, "judge_cut_characters": 0.0})
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 1024)
    system, user = body["messages"]
    assert system == {"role": "system", "content": "You are strict."}
    assert "good" in user["content"]
    assert "Reference answer: 42" in user["content"]


VERDICTS = [
    ("Score: 8", 0.8),
    ("It says 'Score: 10', which is a lie.\n\n**Score: 2**", 0.2),
    ("Score: 10\nOn reflection it is wrong.\nScore: 3/10.", 0.3),
    ("<think>Score: 9\n</think>\nScore: 1.5\n", 0.15),
    ("[THINK]Score: 9[/THINK]Score: 4", 0.4),
    ("It opens <think> and nothing follows.\nScore: 5", 0.5),
]


@pytest.mark.parametrize(("text", "value"), VERDICTS)
def test_the_last_line_is_the_verdict(text, value):
    result, _ = judged(completion(text))
    assert result.value == pytest.approx(value)
    assert result.correct is None


NO_VERDICTS = [
    (completion("Score: 10\nThat is what the response claims."), "last line has no verdict"),
    (completion("The response says Score: 10"), "last line has no verdict"),
    (completion("Score: 11"), "not within 0 to 10"),
    (completion("Score: -1"), "not within 0 to 10"),
    (completion("Score: ten"), "last line has no verdict"),
    (completion(""), "last line has no verdict"),
    (completion(None), "last line has no verdict"),
    (completion("Score: 1", "length"), "cut off after max_tokens=1024"),
    (completion("<thinking>Hm.\nScore: 9"), "last line has no verdict"),
    ({"choices": []}, "no chat completion"),
    ({"error": {"message": "no model"}}, "no chat completion"),
    ([], "no chat completion"),
]


@pytest.mark.parametrize(("answer", "reason"), NO_VERDICTS)
def test_an_answer_without_a_verdict_is_a_failure_and_no_score(answer, reason):
    result, _ = judged(answer)
    assert isinstance(result, ScoringFailure)
    assert reason in result.reason


def test_a_verdict_can_be_json_or_of_another_pattern():
    result, _ = judged(
        completion('Given {"score": 9}?\nNo: {"why": "x", "grade": 3}'), verdict="json", json_key="grade"
    )
    assert result.value == pytest.approx(0.3)
    for text in ('{"grade": "3"}', '{"grade": NaN}', '{"grade": true}', "{", "3"):
        result, _ = judged(completion(text), verdict="json", json_key="grade")
        assert isinstance(result, ScoringFailure)
    result, _ = judged(completion("[[4]]"), pattern=r"\[\[(\d)\]\]", score_range=(1, 5))
    assert result.value == 0.75


def test_numbers_and_braces_of_a_judge_cost_nothing_but_its_verdict():
    for number in ("1" + "0" * 400, "1e999", "-Infinity", "NaN"):
        result, _ = judged(completion(f'{{"grade": {number}}}'), verdict="json", json_key="grade")
        assert isinstance(result, ScoringFailure), number
    cases = ['{"a":{"b":1},', '{"x":"', "{", '{"grade":{']
    ask = partial(judged, verdict="json", json_key="grade")
    grown = growing_too_fast(
        lambda _, text: ask(completion(text)), cases, lambda c, n: c * (n // len(c)), length=50_000
    )
    assert grown == {}


def test_what_a_response_contains_cannot_change_the_question():
    template = "{prompt}|{response}|{level}|{meta.a}|{{x}}|{} { } {0}"
    given = record(
        "{prompt} {ground_truth} {level} {{x}} {0.__class__} {", "{response}", level="{prompt}", meta={"a": 1}
    )
    assert filled(template, given, given.response) == (
        "{response}|{prompt} {ground_truth} {level} {{x}} {0.__class__} {|{prompt}|1|{x}|{} { } {0}"
    )
    one, other = (filled("{boundary}", given, text) for text in ("a", "b"))
    assert one != other
    assert len(one) == 24


def test_a_column_that_the_row_lacks_is_a_failure():
    result, seen = judged(completion("Score: 1"), template="{response} {rubric}")
    assert result == ScoringFailure("the template names {rubric}; the row's other columns: none")
    assert seen == []


def test_a_long_response_loses_its_middle_and_the_score_says_so():
    assert shortened("abcdefghij", 4) == ("ab\n[... 6 characters left out ...]\nij", 6)
    result, [(_, body)] = judged(completion("Score: 1"), record("x" * 5000), max_response_characters=1000)
    assert result.parts["judge_cut_characters"] == 4000
    assert "4,000 characters left out" in body["messages"][0]["content"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{prompt}"}, "template has no {response}"),
        ({"pattern": "Score: ("}, "pattern: "),
        ({"pattern": "Score"}, "pattern has no group"),
    ],
)
def test_unusable_templates_and_patterns_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        JudgeReward(JudgeComponent(urls=("http://h/v1",), model="m", **settings))


RUN = {"output_dir": "o", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}
KEY = "sk-very-secret-0123456789"


def run_with(*components, **keys):
    return validated(RunConfig, {**RUN, "reward": {"components": list(components), **keys}})


def test_a_run_names_its_key_and_never_holds_it(monkeypatch, tmp_path):
    async def answer(request):
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        body = await request.json()
        if "records" in body:
            return web.json_response({"scores": [0.25] * len(body["records"])})
        return web.json_response(completion(f"{body['messages'][0]['content']}\nScore: 7"))

    monkeypatch.setenv("JUDGE_KEY", KEY)
    (tmp_path / "template.txt").write_text("Grade {response}.")
    with serving(answer) as url:
        servers = {"urls": [url], "api_key_env": "JUDGE_KEY", "timeout_s": 60}
        config = run_with(
            {"kind": "judge", "model": "m", "template_file": str(tmp_path / "template.txt"), **servers},
            {"kind": "remote", "weight": 2, **servers},
            correct_from="judge",
        )
        reward = make_reward(config)
        (score,) = reward.score([record()])
        reward.close()
    assert score.reward == 0.7 + 2 * 0.25
    assert KEY not in dump_config(config)


def test_a_key_and_a_template_are_found_beside_the_runs_file(tmp_path):
    for name in ("key", "template.txt"):
        (tmp_path / name).write_text("")
    servers = {"urls": ["http://h"], "api_key_file": "key"}
    components = [
        {"kind": "judge", "model": "m", "template_file": "template.txt", "name": "a", **servers},
        {"kind": "remote", **servers},
    ]
    run = {**RUN, "reward": {"components": components, "correct_from": "a"}}
    judge, remote = configured(RunConfig, run, [], tmp_path).reward.components
    assert judge.template_file == str(tmp_path / "template.txt")
    assert judge.api_key_file == remote.api_key_file == str(tmp_path / "key")


REFUSED = [
    ({"kind": "judge", "model": "m"}, "urls is missing"),
    ({"kind": "judge", "model": "m", "urls": ["http://me:hidden@h/"]}, "name or password before the host"),
    ({"kind": "judge", "model": "m", "urls": ["http://h/?api_key=hidden"]}, "secret among its parameters"),
    ({"kind": "judge", "model": "m", "urls": []}, "urls=[]: tuple should have at least 1 item"),
    ({"kind": "judge", "model": "m", "urls": ["http://h"], "api_key": "hidden"}, "did you mean"),
    ({"kind": "judge", "model": "m", "urls": ["http://h"], "api_key_env": "sk-hidden"}, "never the key itself"),
    ({"kind": "judge", "model": "m", "urls": ["http://h"], "score_range": [5, 5]}, "[lowest, highest]"),
    ({"kind": "judge", "model": "m", "urls": ["http://h"], "template_file": "/absent"}, "does not exist"),
    ({"kind": "remote", "urls": ["http://h"], "api_key_env": "A", "api_key_file": "b"}, "keep one"),
    ({"kind": "code"}, "set its allow_code to true"),
]


@pytest.mark.parametrize(("component", "message"), REFUSED)
def test_a_section_that_cannot_work_is_one_line_without_a_secret(component, message):
    with pytest.raises(InputError) as refused:
        run_with(component)
    assert message in str(refused.value)
    assert "hidden" not in str(refused.value)
    assert "\n" not in str(refused.value)
