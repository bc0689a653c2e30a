"""Rules tell choices, true or false, proofs and whole numbers from everything else, benchmarks included."""

import json
from pathlib import Path

import pytest

from dapo_mega.config.preparation import FiltersConfig
from dapo_mega.errors import InputError
from dapo_mega.preparation.candidates import Candidate
from dapo_mega.preparation.filters import Filters, integer_of, multiple_choice, proof, true_or_false

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

CHOICES = [
    "Which is prime? (A) 4 (B) 5 (C) 6",
    "Which is prime?\nA. 4\nB. 5\nC. 6\nD. 8",
    r"How many? $\textbf{(A)}\ 3\qquad\textbf{(B)}\ 4\qquad\textbf{(C)}\ 5$",
    r"How many? $\text{(A)}\,3 \quad \text{(B)}\,4 \quad \text{(C)}\,5$",
    "How many?\nA) 3\nB) 4\nC) 5",
    "正确的是\nA、3\nB、4\nC、5",
]
NO_CHOICES = [
    "In triangle ABC the points A, B and C lie on a circle. Find the radius.",
    "[asy] draw (A) -- (B) -- (C); [/asy] Find $AB$.",
    "Bags (A) and (B) hold 3 balls. How many are in bag (D)?",
    r"Let $f(A)=1$, $f(B)=2$, $f(C)=3$. Find $f(D)$.",
    "A, B, and C are people. A. is 3 years older.",
]
PROOFS = [
    "Let $n$ be odd. Prove that $n^2$ is odd.",
    "Show that there are infinitely many primes.",
    "Let $a,b>0$. (a) Prove that $a+b \\ge 2\\sqrt{ab}$.",
    "Given $x>1$, show that $x^2>1$.",
    "已知 $a>b$，证明 $a+1>b+1$。",
]
NO_PROOFS = [
    "Find all $n$ and prove that there are no others.",
    "How many numbers can be shown that way?",
    "Prove that $x$ is even. What is $x$?",
    "The proof that $n=3$ takes Ann 4 hours. Compute her speed.",
]


def test_options_in_the_order_of_the_alphabet_are_multiple_choice() -> None:
    assert [text for text in CHOICES if multiple_choice(text) is None] == []
    assert [text for text in NO_CHOICES if multiple_choice(text)] == []


def test_demands_for_a_proof_alone_are_proofs() -> None:
    assert [text for text in PROOFS if proof(text) is None] == []
    assert [text for text in NO_PROOFS if proof(text)] == []


def test_true_or_false_is_told_by_answer_or_question() -> None:
    yes = [("Is 7 prime?", "Yes"), ("Is it?", r"\text{False}"), ("True or false: 2 is odd.", "B")]
    yes += [("Determine whether the claim below is true.", "1")]
    no = [("How many are true?", "3"), ("What is 2?", "2"), ("Name the northern one.", "Norway")]
    assert [case for case in yes if true_or_false(*case) is None] == []
    assert [case for case in no if true_or_false(*case)] == []


def test_whole_numbers_are_written_in_one_way() -> None:
    cases = {
        "27.0": "27",
        "27,000": "27000",
        "$-7$": "-7",
        r"\boxed{+5}": "5",
        "007": "7",
        "-0": "0",
        "1{,}000": "1000",
    }
    cases |= {"12.": "12", "1{,}000": "1000", "−3": "-3"}
    assert {text: integer_of(text) for text in cases} == cases
    others = ["2.5", "1,2", "12,34", "x", "", "1/2", "10%", "3 cm", "1e5", r"\frac{4}{2}", "--3"]
    assert [text for text in others if integer_of(text) is not None] == []


def refusals(config: FiltersConfig, texts: list[str], answer: str = "1") -> list[str]:
    filters = Filters(config)
    found = [filters.refusal(Candidate(({"role": "user", "content": t},), t, t, answer)) for t in texts]
    return [reason for reason, _ in filter(None, found)]


def test_filters_are_off_unless_they_are_switched_on(tmp_path: Path) -> None:
    texts = [CHOICES[0], PROOFS[0], "True or false: 2 is odd.", "Bestimme alle ganzen Zahlen mit dieser Eigenschaft."]
    assert refusals(FiltersConfig(), [*texts, "x" * 50_001], "x") == ["too many characters"]
    config = FiltersConfig(multiple_choice=True, proofs=True, true_false=True, languages=("en", "fr"))
    assert refusals(config, texts) == ["multiple choice", "proof", "true or false", "language"]
    assert refusals(FiltersConfig(answer_type="integer"), texts[:1], "1/2") == ["answer is no integer"]
    with pytest.raises(InputError, match=r"filters\.languages: 'english' is not one of .*de"):
        Filters(FiltersConfig(languages=("english",)))


def test_prompts_are_measured_in_tokens(tmp_path: Path) -> None:
    from dapo_mega.data.tokenizer import build_byte_tokenizer

    build_byte_tokenizer().save_pretrained(tmp_path)
    config = FiltersConfig(tokenizer=str(tmp_path), max_prompt_tokens=5)
    assert refusals(config, ["12345", "123456"]) == ["too many tokens"]
    assert list(Filters(config).versions()) == ["tokenizer_sha256"]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the benchmarks of shared/data")
def test_benchmarks_lose_nothing_but_their_three_multiple_choice_problems() -> None:
    problems = [row["prompt"][0]["value"] for row in json.loads((DATA / "math500.json").read_text())]
    for file, column in (("amc23", "problem"), ("minerva-math", "problem"), ("olympiadbench", "question")):
        problems += [json.loads(line)[column] for line in (DATA / f"{file}.jsonl").read_text().splitlines()]
    config = FiltersConfig(multiple_choice=True, proofs=True, true_false=True, languages=("en",))
    assert refusals(config, problems) == ["multiple choice"] * 3
