import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dapo_mega.rewards import AnswerVerifier, Verdict
from dapo_mega.rewards import verifier as verifier_module
from dapo_mega.rewards.algebra import latex_equal
from tests.unit.rewards.hostile import CODE, HOSTILE_ANSWERS, shown

pytestmark = pytest.mark.timeout(180)

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def hostile_compare(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], bool]:
    """A misbehaving comparison that spawned workers can import: they inherit this process's `sys.path`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import hostile_compare

    return hostile_compare.compare


def outcomes(verdicts: list[Verdict]) -> list[str]:
    return [verdict.outcome for verdict in verdicts]


def processes(verifier: AnswerVerifier) -> list[psutil.Process]:
    """Those that compare, with their children."""
    pids = [worker._process.pid for worker in verifier._workers if worker._process]
    return [each for pid in pids for each in (psutil.Process(pid), *psutil.Process(pid).children())]


def test_verdicts_keep_the_order_and_carry_the_answer() -> None:
    with AnswerVerifier(1, 10.0) as verifier:
        verdicts = verifier.verify(
            [
                ("Answer: 42", "42"),
                ("Answer: $2(k+1)$", "2k+2"),
                ("I give up", "42"),
                ("Answer: 41", "42"),
                ("Answer: $2(k+2)$", "2k+2"),
                ("Answer: 9^9^9^9", "42"),
                ("Answer: \\frac{84}{2}", "42"),
            ]
        )
    assert verdicts == [
        Verdict(True, "42", "correct"),
        Verdict(True, "$2(k+1)$", "correct"),
        Verdict(False, None, "no_answer"),
        Verdict(False, "41", "wrong"),
        Verdict(False, "$2(k+2)$", "wrong"),
        Verdict(False, "9^9^9^9", "refused"),
        Verdict(True, "\\frac{84}{2}", "correct"),
    ]


def test_integers_are_verified_without_a_worker_and_fast() -> None:
    items = [(f"some reasoning\nAnswer: ${index}$", str(index - index % 2)) for index in range(10_000)]
    with AnswerVerifier(2, 1.0) as verifier:
        begin = time.process_time()
        verdicts = verifier.verify(items)
        seconds = time.process_time() - begin
        assert processes(verifier) == []
    assert [verdict.correct for verdict in verdicts] == [index % 2 == 0 for index in range(10_000)]
    assert seconds < 1.0


def test_nothing_to_verify() -> None:
    with AnswerVerifier(1, 1.0) as verifier:
        assert verifier.verify([]) == []


def test_the_boxed_style_reads_boxes() -> None:
    with AnswerVerifier(1, 1.0, extraction="boxed") as verifier:
        assert outcomes(verifier.verify([("\\boxed{42}", "42"), ("Answer: 42", "42")])) == [
            "correct",
            "no_answer",
        ]


def test_an_answer_without_end_is_refused_unread() -> None:
    with AnswerVerifier(1, 1.0, extraction="boxed") as verifier:
        assert outcomes(verifier.verify([("\\boxed{" + "y" * 10**6 + "}", "42")])) == ["refused"]


def test_a_hanging_comparison_costs_only_its_own_answer(hostile_compare: Callable[[str, str], bool]) -> None:
    answers = ["same", "hang", "same", "spin", "other", "same"]
    with AnswerVerifier(2, 0.1, compare=hostile_compare) as verifier:
        # Different truths, so that no two comparisons are the same one.
        items = [(f"Answer: \\sum {index}x{answer}", f"\\sum {index}x") for index, answer in enumerate(answers)]
        verdicts = verifier.verify(items)
    assert outcomes(verdicts) == ["correct", "timeout", "correct", "timeout", "wrong", "correct"]
    assert [verdict.correct for verdict in verdicts] == [True, False, True, False, False, True]


def test_a_crashing_comparison_costs_only_its_own_answer(hostile_compare: Callable[[str, str], bool]) -> None:
    answers = ["same", "exit", "same", "segfault", "raise", "memory", "other", "exit", "same", "same", "same"]
    with AnswerVerifier(2, 10.0, compare=hostile_compare) as verifier:
        items = [(f"Answer: \\sum {index}x{answer}", f"\\sum {index}x") for index, answer in enumerate(answers)]
        verdicts = verifier.verify(items)
        expected = {"same": "correct", "other": "wrong"}
        assert outcomes(verdicts) == [expected.get(answer, "crash") for answer in answers]
        # The pool serves on after the crashes.
        assert outcomes(verifier.verify([(r"Answer: \sum 1ysame", r"\sum 1y")])) == ["correct"]


def test_a_worker_that_is_killed_as_it_starts_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started, popen = [], subprocess.Popen

    def killed_once(*arguments: object, **options: object) -> object:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", killed_once)
    with AnswerVerifier(1, 10.0) as verifier:
        assert outcomes(verifier.verify([(r"Answer: \binom{6}{2}", "15")])) == ["correct"]
    assert len(started) == 2


def kill(process: psutil.Process) -> None:
    """Until it is gone, as the signal takes its time: it could still answer."""
    process.kill()
    deadline = time.monotonic() + 30
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("harm", [kill, psutil.Process.suspend])
def test_a_worker_that_is_killed_or_stopped_idle_is_replaced(
    harm: Callable[[psutil.Process], None],
    hostile_compare: Callable[[str, str], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier_module, "_GRACE_S", 0.1)
    with AnswerVerifier(1, 0.1, compare=hostile_compare) as verifier:
        assert outcomes(verifier.verify([(r"Answer: \sum 1ysame", r"\sum 1y")])) == ["correct"]
        before, child = processes(verifier)
        harm(child)
        assert outcomes(verifier.verify([(r"Answer: \sum 2ysame", r"\sum 2y")])) == ["correct"]
        harm(processes(verifier)[0])
        assert outcomes(verifier.verify([(r"Answer: \sum 3ysame", r"\sum 3y")])) == ["correct"]
        assert before not in processes(verifier)


def test_time_is_that_of_the_processor_and_bounded_for_all_together(
    hostile_compare: Callable[[str, str], bool], caplog: pytest.LogCaptureFixture
) -> None:
    answers = ["waitsame", *["spin"] * 20, "same"]
    with AnswerVerifier(1, 0.4, compare=hostile_compare) as verifier:
        items = [(f"Answer: \\sum {index}x{a}", f"\\sum {index}x") for index, a in enumerate(answers)]
        verdicts = verifier.verify(items)
        worker, _ = processes(verifier)
        used = worker.cpu_times()
        assert outcomes(verifier.verify(items[1:2])) == ["timeout"]  # Calls stand alone until somebody tells steps.
        verifier.budget.begin_step()
        verifier.verify(items[1:14])
        assert outcomes(verifier.verify(items[1:2])) == ["cut_short"]
        verifier.budget.begin_step()
        assert outcomes(verifier.verify(items[1:2])) == ["timeout"]
    assert outcomes(verdicts) == ["correct", *["cut_short"] * 20, "correct"]
    # 3 limits, and 0.05 s for each beyond them; without a budget it would be 20 limits and more.
    assert used.children_user + used.children_system < 6 * 0.4 + 20 * 0.05
    assert sum("answers that take long to compare have used up the 1.2 s" in r.message for r in caplog.records) == 1


def test_many_comparisons_survive_repeated_crashes(hostile_compare: Callable[[str, str], bool]) -> None:
    answers = ["exit" if index % 50 == 7 else "same" for index in range(200)]
    with AnswerVerifier(2, 10.0, compare=hostile_compare) as verifier:
        verdicts = verifier.verify(
            [(f"Answer: \\sum {index}x{a}", f"\\sum {index}x") for index, a in enumerate(answers)]
        )
    assert outcomes(verdicts) == ["crash" if answer == "exit" else "correct" for answer in answers]


SLOW = (
    r"\binom{1000000000}{500000000}",  # minutes inside big-integer arithmetic
    r"\binom{900000000}{300000000}+x",
)


def test_slow_expressions_within_the_bounds_are_cut_at_the_time_limit() -> None:
    easy = [("Answer: 1+x", "x+1"), ("Answer: $x+x$", "2x")]
    items = [*((f"Answer: {slow}", "x+1") for slow in SLOW), *easy]
    # Between the milliseconds of the easy ones and the 15 s and more of the slow ones.
    with AnswerVerifier(2, 0.5) as verifier:
        assert outcomes(verifier.verify(items)) == ["timeout"] * 2 + ["correct"] * 2


@pytest.mark.parametrize("extraction", ["dapo", "auto"])
def test_code_in_an_answer_is_not_executed(extraction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    items = [(f"Answer: {code}", truth) for code in CODE for truth in ("42", "x+1", r"\text{east}")]
    with AnswerVerifier(1, 10.0, extraction) as verifier:
        verdicts = verifier.verify(items)
    assert [item for item, verdict in zip(items, verdicts, strict=True) if verdict.correct] == []
    assert {verdict.outcome for verdict in verdicts} & {"crash", "timeout"} == set()
    assert list(tmp_path.iterdir()) == []


def test_comparing_code_as_algebra_does_not_execute_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where nothing would hide it."""
    monkeypatch.chdir(tmp_path)
    assert [code for code in CODE for truth in ("42", r"\text{east}") if latex_equal(code, truth)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extraction", ["dapo", "auto"])
def test_a_hostile_response_is_wrong_and_neither_crashes_nor_hangs(extraction: str) -> None:
    responses = [f"Answer: {answer}" for answer in HOSTILE_ANSWERS]
    responses += ["Answer:" + " " * 10**6, "Answer: 1\n" * 10**5, "\udfff" * 1000, ""]
    items = [(response, truth) for response in responses for truth in ("7", "x+1", "42")]
    with AnswerVerifier(1, 5.0, extraction) as verifier:
        verdicts = verifier.verify(items)
    allowed = {"no_answer", "refused", "wrong"}
    judged = zip(items, verdicts, strict=True)
    assert [(shown(item[0]), item[1], found) for item, found in judged if found.outcome not in allowed] == []


def test_close_ends_the_workers_and_later_use_is_an_error() -> None:
    verifier = AnswerVerifier(2, 10.0)
    verifier.verify([(r"Answer: \binom{6}{2}", "15"), (r"Answer: \binom{7}{2}", "21")])
    workers = processes(verifier)
    assert len(workers) == 4
    verifier.close()
    verifier.close()
    psutil.wait_procs(workers, timeout=30)
    assert not any(worker.is_running() for worker in workers)
    with pytest.raises(RuntimeError, match="closed"):
        verifier.verify([("Answer: 1", "1")])


@pytest.mark.parametrize(
    ("num_workers", "time_limit_s", "extraction", "named"),
    [(0, 1.0, "dapo", "num_workers=0"), (1, 0.0, "dapo", "time_limit_s=0"), (1, 1.0, "xml", "xml")],
)
def test_a_useless_setting_is_refused(num_workers: int, time_limit_s: float, extraction: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AnswerVerifier(num_workers, time_limit_s, extraction)


SCRIPT = """
from dapo_mega.rewards import AnswerVerifier
import sys
verifier = AnswerVerifier(1, 10.0)
print(verifier.verify([(r"Answer: \\binom{6}{2}", "15")])[0].outcome, "torch" in sys.modules)
"""


def test_a_script_without_a_guard_works_and_ends_even_if_it_forgets_to_close(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["correct", "False"]
