"""`--dry-run` finds, in one line each, what would end a run at its start."""

import json
import re

import pytest
import yaml

from dapo_mega.config import RunConfig, SftConfig, load_config
from dapo_mega.data import build_byte_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.planning.dry_run import print_dry_run

TINY = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260,
    "max_position_embeddings": 2**16, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
KEY = "DAPO_MEGA_API_KEY"
FLEET = ["rollout.placement=fleet", "rollout.fleet.rendezvous=10.0.0.1:21600"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    rows = [{"question": f"{n} + 1?", "answer": f"so #### {n + 1}", "reply": f"Answer: {n + 1}"} for n in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "empty.jsonl").write_text("")
    dataset = {
        "path": str(tmp_path / "train.jsonl"),
        "columns": {"prompt": "question", "ground_truth": "answer"},
        "ground_truth_style": "gsm8k",
    }
    run = {
        "output_dir": "o",
        "num_steps": 1,
        "model": {"path": "models/m"},
        "data": {"train": dataset, "evaluation": dataset},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path / "run.yaml"


def dry_run(capsys, file, *overrides, kind=RunConfig, **options):
    print_dry_run(load_config(kind, file, overrides), **options)
    return capsys.readouterr().out.splitlines()


def test_a_good_file_is_valid_and_what_is_not_here_is_noted(file, capsys):
    lines = dry_run(capsys, file)
    assert [line for line in lines if line.startswith("note: ")] == [
        f"note: model.path={file.parent}/models/m is not on this machine; sizes are not checked against the model "
        "(give model.architecture to check them)"
    ]
    assert lines[-1] == (
        "dry run: the configuration is valid, apart from what the note above could not check here; nothing was started"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train.template=dpao"], r"data\.train: template 'dpao' .*; did you mean 'dapo'\?"),
        (["data.evaluation.template=dpao"], r"data\.evaluation: template 'dpao'"),
        (["data.train={path: not/here.jsonl, template: cot}"], r"data\.train: template 'cot'.* use one of dapo, "),
        (
            ["data.train.columns.prompt=problem"],
            r"data\.train: .*train\.jsonl, line 1 has no column 'problem'; it has question, answer, reply; set "
            r"columns\.prompt to one of them",
        ),
        (["data.evaluation.columns.ground_truth=anwser"], r"data\.evaluation: .* did you mean 'answer'\?"),
        (["data.train.ground_truth_style=boxed"], r"data\.train: .*train\.jsonl, line 1: .*boxed"),
        (["data.train.path=FOLDER/empty.jsonl"], r"data\.train: dataset .*empty\.jsonl has no rows"),
        (
            ["rollout.placement=fleet", "rollout.fleet.rendezvous=node0"],
            r"rollout\.fleet\.rendezvous='node0' is not an address; give host:port, such as 10\.0\.0\.1:21600",
        ),
        (
            ["rollout.placement=fleet", "rollout.fleet={urls: [http://a:1], min_engines: 12}"],
            r"min_engines=12, but rollout\.fleet\.urls has 1, .*set min_engines to at most 1",
        ),
    ],
)
def test_what_would_end_the_run_at_its_start_is_one_line(file, capsys, overrides, message):
    with pytest.raises(InputError) as caught:
        dry_run(capsys, file, *(override.replace("FOLDER", str(file.parent)) for override in overrides))
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)
    assert not capsys.readouterr().out


def test_prompts_are_shown_where_the_model_is_and_a_model_without_a_tokenizer_is_refused(file, capsys):
    model = file.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(InputError, match="no tokenizer could be loaded from"):
        dry_run(capsys, file, f"model.path={model}")
    build_byte_tokenizer().save_pretrained(model)
    lines = dry_run(
        capsys, file, f"model.path={model}", "data.train.template=as_is", "data.evaluation.path=else/where/x"
    )
    at = lines.index("first prompt of data.train, 6 tokens, special tokens in ⟦⟧:")
    assert lines[at + 1] == "  | 0 + 1?"
    assert lines[at + 2].startswith("WARNING: data.train: 3 of the first 3 prompts do not ask for a line 'Answer: ...'")
    assert not any("first prompt of data.evaluation" in line for line in lines)
    assert lines[-1].startswith("dry run: the configuration is valid")


def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(file):
    with pytest.raises(InputError, match=r"ground_truth_style='gsm'.* 'verbatim', 'boxed', 'gsm8k' or 'unchecked'"):
        load_config(RunConfig, file, ["data.train.ground_truth_style=gsm"])


def test_a_dataset_that_is_not_here_may_be_on_the_cluster(file, capsys):
    lines = dry_run(capsys, file, "data.train.path=/cluster/train.jsonl")
    assert (
        "note: data.train.path=/cluster/train.jsonl is not on this machine; its columns and rows were not checked, and "
        "it must be there when the run starts"
    ) in lines
    assert "apart from what the 2 notes above could not check here" in lines[-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.path=FOLDER/trian.jsonl", "trian.jsonl does not exist; did you mean FOLDER/train.jsonl?"),
        ("data.evaluation.path=FOLDER/other.csv", "data.evaluation.path=FOLDER/other.csv does not exist; correct it"),
        ("data.train.path=FOLDER/dta/x/train.jsonl", "did you mean FOLDER/data/x/train.jsonl?"),
        ("data.train.path=FOLDER/train.jsonl/x", "cannot be used: Not a directory"),
        ("model.path=FOLDER/modl", "model.path=FOLDER/modl does not exist; did you mean FOLDER/model?"),
        ("critic.path=FOLDER/critic", "critic.path=FOLDER/critic does not exist"),
        ("model.architecture=FOLDER/a.json", "model.architecture=FOLDER/a.json does not exist"),
        ("reward.components=[{kind: remote, urls: [http://h], api_key_file: FOLDER/key}, {kind: answer}]",
         "reward.components.0.api_key_file=FOLDER/key does not exist"),
        ("output_dir=FOLDER/train.jsonl/run", "output_dir=FOLDER/train.jsonl/run cannot be used: Not a directory"),
        ("output_dir=FOLDER/train.jsonl", "output_dir=FOLDER/train.jsonl cannot be used: Not a directory"),
        ("output_dir=/proc/run/1", "output_dir=/proc/run/1 cannot be used: "),
        ("weight_sync.folder=/proc/run", "weight_sync.folder=/proc/run cannot be used: "),
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_used_here_is_one_line_unless_the_run_is_for_elsewhere(file, capsys, override, message):
    for folder in ("data", "model"):
        (file.parent / folder).mkdir()
    before = sorted(file.parent.iterdir())
    overrides = ("output_dir=" + str(file.parent / "new" / "run"), override.replace("FOLDER", str(file.parent)))
    with pytest.raises(InputError, match=re.escape(message.replace("FOLDER", str(file.parent)))) as caught:
        dry_run(capsys, file, *overrides)
    assert "\n" not in str(caught.value)
    assert not capsys.readouterr().out
    if "model.path" not in override and "train.jsonl" not in override:
        assert "is valid" in dry_run(capsys, file, *overrides, elsewhere=True)[-1]
    assert sorted(file.parent.iterdir()) == before


def test_what_matters_comes_first_and_all_keys_only_when_they_are_asked_for(file, capsys):
    lines = dry_run(capsys, file)
    assert lines[0].startswith("parallel layout: ")
    assert len(lines) < 15
    more = dry_run(capsys, file, everything=True)
    assert more[: len(lines) - 1] == lines[:-1]
    assert more[-1] == lines[-1]
    assert yaml.safe_load("\n".join(more[len(lines) : -1])) == load_config(RunConfig, file).model_dump(mode="json")


def test_a_token_without_an_embedding_is_found_in_any_row(file, capsys):
    model = file.parent / "model"
    model.mkdir()
    tokenizer = build_byte_tokenizer()
    (model / "config.json").write_text(json.dumps(TINY | {"vocab_size": len(tokenizer)}))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(150)] + [
        {"question": "<new>", "answer": "#### 1"}
    ]
    (file.parent / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "is valid" in dry_run(capsys, file, f"model.path={model}")[-1]
    with pytest.raises(
        InputError, match=r"late.jsonl, line 151 has token \d+ \('<new>'\), for which the model has no emb"
    ):
        dry_run(capsys, file, f"model.path={model}", f"data.train.path={file.parent}/late.jsonl")


def test_engines_need_a_key_which_may_be_on_the_cluster_only(file, capsys, monkeypatch):
    def is_noted(*overrides):
        return any(
            line.startswith(f"note: the environment variable {KEY} is") for line in dry_run(capsys, file, *overrides)
        )

    assert not is_noted()
    assert is_noted(*FLEET)
    assert is_noted("rollout.placement=colocated", FLEET[1])
    monkeypatch.setenv(KEY, "0123456789abcdef")
    assert not is_noted(*FLEET)
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(InputError, match=f"{KEY} cannot be used; it must have at least 16"):
        dry_run(capsys, file, *FLEET)


def test_engines_that_register_may_be_more_than_the_urls(file, capsys):
    lines = dry_run(capsys, file, *FLEET, "rollout.fleet.urls=http://a:1", "rollout.fleet.min_engines=12")
    assert any("dry run: the configuration is valid" in line for line in lines)


@pytest.fixture
def fine_tuning(file):
    values = {
        "output_dir": "o",
        "num_steps": 5,
        "model": {"path": "models/m"},
        "data": {
            "train": {"path": str(file.parent / "train.jsonl"), "columns": {"prompt": "question", "response": "reply"}}
        },
    }
    (file.parent / "sft.yaml").write_text(yaml.safe_dump(values))
    return file.parent / "sft.yaml"


def test_supervised_training_is_described_too(fine_tuning, capsys):
    lines = dry_run(capsys, fine_tuning, "parallel.world_size=4", kind=SftConfig)
    assert "parallel layout: 4 processes = tensor 1 x pipeline 1 x data 4" in lines
    assert any(
        line.startswith("run: 5 updates of 256 demonstrations, about 64 per data-parallel rank") for line in lines
    )
    assert lines[-1].startswith("dry run: the configuration is valid")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.columns.response=answr", r"data\.train: .* has no column 'answr'.*did you mean 'answer'\?"),
        ("data.train.template=dpao", "did you mean 'dapo'"),
        ("parallel={tensor: 3, world_size: 8}", "start 6 or 9 processes"),
    ],
)
def test_mistakes_of_supervised_training_are_one_line(fine_tuning, capsys, override, message):
    with pytest.raises(InputError, match=message):
        dry_run(capsys, fine_tuning, override, kind=SftConfig)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "there is no 'score'; it has no functions"),
        ("def score(records): return [r['fields']['level'] for r in records]", "KeyError: 'level' (line 1)"),
        ("def score(records): return [float('nan')]", "it returned score=nan"),
        ("def score(records): return []", "it returned 0 results for 1 records"),
        ("def score(records): return [1]", "did not say whether it is correct; algorithm.dynamic_sampling_on="),
    ],
)
def test_a_reward_function_is_tried_on_the_first_row(file, capsys, source, message):
    (file.parent / "own.py").write_text(source)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        dry_run(capsys, file, f"reward.function={file.parent}/own.py:score")
    assert "\n" not in str(caught.value)


def test_what_a_reward_says_of_a_made_up_response_is_shown(file, capsys):
    (file.parent / "own.py").write_text(
        "def score(records): return [{'score': 2, 'correct': True, 'parts': {'reply': len(r['fields']['reply'])}} "
        "for r in records]"
    )
    components = f"[{{kind: function, path: {file.parent}/own.py:score, weight: 0.5}}, {{kind: answer, weight: 2}}]"
    lines = dry_run(capsys, file, f"reward.components={components}")
    tried = [line for line in lines if line.startswith("reward of a made-up response to the first prompt: ")]
    assert [line.partition("prompt: ")[2] for line in tried] == [
        "function (weight 0.5): 2, correct=True, reply=9",
        "answer (weight 2): 1, correct=True",
    ]
