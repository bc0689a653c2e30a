"""The page of samples in a real browser: it shows what was written, filters it, and runs nothing that a model said."""

import base64
import gzip
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from dapo_mega.commands.show_samples import main
from dapo_mega.errors import InputError
from dapo_mega.samples.files import file_of, samples_folder, stored_files, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import SampleFile, rows_of_group
from dapo_mega.samples.table import to_table
from dapo_mega.types import Group, Prompt, Response, ScoredTrajectory, Turn
from tests.made_trajectories import scored_answer
from tools.headless_browser import MISSING, Browser, find_browser
from tools.made_samples import ATTACKS, make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    name = 'a <b> & "run" \'</title><script>document.title=1</script>'
    folder = make_run(
        tmp_path_factory.mktemp("page") / name.replace("/", "_"), num_steps=5, num_groups=10, mean_tokens=20
    )
    main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def rows(run_dir):
    return [row for file in stored_files(samples_folder(run_dir)) for row in pq.read_table(file.path).to_pylist()]


@pytest.fixture(scope="module")
def page(run_dir):
    program = find_browser()
    if program is None:
        pytest.skip(MISSING)
    with Browser(program) as browser:
        browser.open(run_dir / "samples.html")
        assert browser.evaluate("document.body.dataset.failed") is None
        yield browser


@pytest.fixture
def other_page(page, run_dir):
    yield page
    page.open(run_dir / "samples.html")


def fill(page, **values):
    """Set these filters and no others; how many responses are shown then."""
    page.evaluate("document.getElementById('clear').click()")
    for name, value in values.items():
        page.evaluate(
            f"{{ const field = document.getElementById('{name}'); field.value = {json.dumps(str(value))}; "
            "field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); }"
        )
    return int(page.evaluate("document.body.dataset.shown"))


def test_filters_find_what_the_files_hold(page, rows):
    part = [{p["name"]: p["value"] for p in row["parts"]} for row in rows]
    expected = {
        (): len(rows),
        (("correct", "true"),): sum(row["correct"] is True for row in rows),
        (("finish", "length"),): sum(row["finish_reason"] == "length" for row in rows),
        (("outcome", "kept"),): sum(row["kept"] is True for row in rows),
        (("outcome", "not kept"),): sum(row["kept"] is False for row in rows),
        (("outcome", "all_wrong"),): sum(row["outcome"] == "all_wrong" for row in rows),
        (("low", 20), ("high", 30)): sum(20 <= row["length"] <= 30 for row in rows),
        (("part", "part format"), ("least", 0.5)): sum(p["format"] >= 0.5 for p in part),
        (("part", "reward"), ("most", -1)): sum(float(f"{row['reward']:.6g}") <= -1 for row in rows),
        (("search", "ONERROR="),): sum("onerror=" in row["response"] + row["prompt"] for row in rows),
        (("search", "/answer: \\d\\d$/"), ("correct", "false")): sum(
            row["response"][-10:-2] == "Answer: " and row["response"][-2:].isdigit() and not row["correct"]
            for row in rows
        ),
        (("search", "no such words"),): 0,
    }
    assert min(count for chosen, count in expected.items() if chosen != (("search", "no such words"),)) > 0
    found = {chosen: fill(page, **dict(chosen)) for chosen in expected}
    assert found == expected


READ = """(async () => {
    const wanted = ROW; let last = null;
    document.querySelector(`.item[data-row="${wanted}"]`).click();
    for (let i = 0; i < 500 && document.body.dataset.reading !== String(wanted); i++)
        await new Promise((done) => setTimeout(done, 5));
    return document.querySelector("#pane-a .response").textContent;
})()"""


def test_no_text_of_a_model_runs_and_all_of_it_is_shown(page, rows, run_dir):
    title = f"{run_dir.name} · samples"
    fill(page)
    page.evaluate("document.querySelector('#steps .step:nth-child(2)').click()")
    shown = {}
    for row in range(len(ATTACKS)):  # Each response of the made run has another attack in its second token.
        text = page.evaluate(READ.replace("ROW", str(row)))
        assert text == "".join(rows[row]["tokens"])
        shown[row] = next(attack for attack in ATTACKS if attack in text)
        page.evaluate(
            "for (const kind of ['mouseover', 'focus', 'click']) for (const e of document.querySelectorAll("
            "'.response *, .prompt *, .item *')) e.dispatchEvent(new Event(kind, { bubbles: kind === 'mouseover' }))"
        )
    assert set(shown.values()) == set(ATTACKS)
    assert page.evaluate("document.title") == title
    assert page.evaluate("document.querySelectorAll('img, svg, iframe, base, textarea, object, a, link').length") == 0
    assert page.evaluate("[...document.scripts].filter((s) => !s.type).length") == 1
    assert (
        page.evaluate(
            "[...document.querySelectorAll('*')].some((e) => [...e.attributes].some((a) => /^on/.test(a.name)))"
        )
        is False
    )
    assert not [event for event in page.events if event["method"] == "Page.javascriptDialogOpening"]


CALLS = (
    '<think>Which?</think><tool_call>{"name": "look", "arguments": {"at": "<b>x"}}</tool_call>',
    "<tool_call>{name: look}</tool_call>",
    'Sure <tool_call>{"name": "look"}',
)
SHOWN = """[...document.querySelectorAll("#pane-a .response > *")].map((e) =>
    [e.className || e.tagName.toLowerCase(), e.textContent])"""


def dialogue(number, *, is_rewritten):
    """Two turns of calls around an attack, and an answer; or one, and one behind a history that was written anew."""
    words = [CALLS[0], "</s>", *ATTACKS, CALLS[1], CALLS[2], "\n", "It is 7", "</s>"]
    sampled = np.array([word not in (*ATTACKS, "\n") for word in words])
    turns = (Turn(2, "stop", {"reward": -0.5}), Turn(13, "length"), Turn(16, "stop", {"reward": 1.0, "correct": 1.0}))
    spans = ((3, len(words)),), (("http://a", len(words)),)
    verdict = {"text": CALLS[0] + "It is 7", "correct": True, "accuracy_reward": 0.5, "reward": 0.5}
    ids, logprobs = np.arange(len(words), dtype=np.int32), np.where(sampled, -1, 0).astype(np.float32)
    segments = (2, len(words)) if is_rewritten else (len(words),)
    return words, ScoredTrajectory(number, ids, logprobs, sampled, turns, *spans, segments, "done", **verdict)


def test_a_trajectory_of_an_environment_is_shown_by_its_turns(other_page, tmp_path):
    words, first = dialogue(1, is_rewritten=False)
    _, second = dialogue(2, is_rewritten=True)
    said = Response(3, np.array([14, 15], np.int32), -np.ones(2, np.float32), "stop", 0)
    answer = scored_answer(said, "It is 7", True, 0.5, 0.5)

    class Words:
        def batch_decode(self, sequences, skip_special_tokens):
            return ["".join(words[i] for i in ids) for ids in sequences]

    rows = list(rows_of_group(Group(Prompt(0, "Look.", np.array([1], np.int32), "7"), (first, second, answer))))
    write_table(
        file_of(samples_folder(tmp_path), "training", 1),
        to_table(SampleFile(1, "training", rows), TokenPieces(Words())),
    )
    main([str(tmp_path)])
    other_page.open(tmp_path / "samples.html")
    texts = [other_page.evaluate(READ.replace("ROW", str(row))) and other_page.evaluate(SHOWN) for row in range(3)]
    assert texts[0] == [
        ["h3", "Turn 1stop · reward -0.5"],
        ["call", 'look {"at":"<b>x"}'],
        ["block turn", CALLS[0] + "</s>"],
        ["h3", "Observed · not sampled"],
        ["block observed", "".join(ATTACKS)],
        ["h3", "Turn 2cut off"],
        ["call", "call bad_json"],
        ["call", "look unclosed"],
        ["block turn", CALLS[1] + CALLS[2]],
        ["h3", "Observed · not sampled"],
        ["block observed", "\n"],
        ["h3", "Turn 3stop · reward 1 · correct 1"],
        ["block turn", "It is 7</s>"],
        ["faint", "Ended: done, the environment said so"],
    ]
    assert texts[1][3:5] == [
        ["h3", "History rewritten: a new piece begins · not sampled"],
        ["block rewritten", "".join(ATTACKS)],
    ]
    assert texts[2] == [["h3", "It is 7"], ["h3 end", "</s>"]]  # Tokens, coloured by probability.
    assert other_page.evaluate("document.title").endswith("samples")
    assert not [event for event in other_page.events if event["method"] == "Page.javascriptDialogOpening"]


def test_the_policy_stops_what_would_come_in_all_the_same(page):
    """As if the page's own script had a hole."""
    page.evaluate(
        "{ const script = document.createElement('script'); script.textContent = 'window.attacked = 1'; "
        "document.body.append(script); const image = document.createElement('img'); image.setAttribute('onerror', "
        "'window.attacked = 2'); image.src = 'http://127.0.0.1:9/'; document.body.append(image); }"
    )
    assert page.evaluate("new Promise((done) => setTimeout(() => done(window.attacked ?? null), 50))") is None
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert "default-src 'none'" in page.evaluate("document.querySelector('meta[http-equiv]').content")
    page.evaluate("document.querySelectorAll('body > img, body > script:last-child').forEach((e) => e.remove())")


def test_keys_move_and_two_steps_stand_side_by_side(page):
    fill(page)
    page.evaluate("document.activeElement.blur(); document.querySelector('#steps .step:nth-child(2)').click()")
    page.evaluate("document.activeElement.blur()")
    before = int(page.evaluate("document.querySelector('#pane-a .item.on').dataset.row"))
    page.press("j")
    assert int(page.evaluate("document.querySelector('#pane-a .item.on').dataset.row")) == before + 1
    page.press("n")
    assert int(page.evaluate("document.querySelector('#pane-a .item.on').dataset.row")) % 8 == 0
    page.press("c")
    sides = page.evaluate(
        "[...document.querySelectorAll('.pane:not([hidden]) .pick')].map((e) => e.selectedOptions[0].text)"
    )
    assert sides == ["step 1", "step 5"]
    page.press("c")


def test_only_what_is_in_view_is_in_the_list(page, rows):
    fill(page)
    page.evaluate("document.querySelector('#steps .step').click()")
    assert page.evaluate("document.querySelectorAll('#pane-a .item').length") < 80 < len(rows)


def test_a_folder_without_samples_is_named(tmp_path):
    with pytest.raises(InputError, match="holds no samples; give the output_dir of a run"):
        main([str(tmp_path)])
    folder = samples_folder(tmp_path)
    folder.mkdir()
    (folder / "step_00000001.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"step_00000001\.parquet cannot be read"):
        main([str(tmp_path)])


def damaged(content, place):
    return content[:place] + bytes(byte ^ 0xFF for byte in content[place : place + 200]) + content[place + 200 :]


def test_files_that_cannot_be_read_are_named_and_the_others_shown(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", num_steps=5, num_groups=2, mean_tokens=20)
    paths = [file.path for file in stored_files(samples_folder(run_dir))]
    contents = [path.read_bytes() for path in paths]
    paths[0].write_bytes(b"")
    paths[1].write_bytes(contents[1][: len(contents[1]) // 2])
    paths[2].write_bytes(damaged(contents[2], len(contents[2]) // 2))
    pq.write_table(pq.read_table(paths[3]).drop_columns("reward"), paths[3])
    pq.write_table(pq.read_table(paths[4]).replace_schema_metadata(None), paths[4])
    main([str(run_dir)])
    printed = capsys.readouterr()
    bad = [path.name for path in paths[:5]]
    assert [line.split(" cannot be read (")[0].split("/")[-1] for line in printed.err.splitlines()] == bad
    assert printed.out.startswith("32 responses of 1 steps and evaluations: ")
    meta = re.search(r'id="meta">([^<]*)<', (run_dir / "samples.html").read_text())[1]
    shown = json.loads(gzip.decompress(base64.b64decode(meta)))
    assert shown["notes"] == [f"5 that cannot be read left out: {', '.join(bad[:3])}, ..."]
    assert [(step["step"], step["kind"]) for step in shown["steps"]] == [(5, "evaluation")]


def test_the_page_leaves_out_the_oldest_steps_and_says_so(run_dir, tmp_path, capsys):
    main([str(run_dir), "--output", str(tmp_path / "some.html"), "--responses", "120"])
    assert "(4 older ones left out: --steps or --responses)" in capsys.readouterr().out
    main([str(run_dir), "--output", str(tmp_path / "some.html"), "--steps", "2:3"])
    assert capsys.readouterr().out.startswith("160 responses of 2 steps and evaluations: ")
    with pytest.raises(InputError, match="there are samples of steps 1 to 5 only"):
        main([str(run_dir), "--steps", "9"])
