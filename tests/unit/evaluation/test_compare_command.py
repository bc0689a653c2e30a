"""`dapo-mega compare` as users start it."""

import json

import pyarrow.parquet as pq
import pytest

from dapo_mega.commands.compare import main
from dapo_mega.errors import InputError
from tests.unit.evaluation.made_evaluations import save


def test_it_prints_tables_and_writes_picture_and_data(tmp_path, capsys):
    base, trained = save(tmp_path / "base", [1] * 20, 16), save(tmp_path / "$dapo$", [16, 0] * 10, 16)
    output = tmp_path / "new" / "comparison"
    main([str(base), str(trained), "--output", str(output), "--k", "1", "4", "16"])
    printed = capsys.readouterr().out
    assert printed.startswith("sums: 20 problems; responses to each: base 16, $dapo$ 16\n")
    rows = {line.split()[0]: line for line in printed.splitlines() if line}
    assert "0.062" in rows["avg@16"]
    assert rows["avg@16"].endswith("10    10")
    assert "pass@1" not in rows
    assert (output / "comparison.png").read_bytes().startswith(b"\x89PNG")
    (benchmark,) = json.loads((output / "comparison.json").read_text())["benchmarks"]
    assert (benchmark["base"], benchmark["name"], benchmark["ks"]) == ("base", "sums", [1, 4, 16])
    assert benchmark["measures"]["$dapo$"]["pass@16"]["value"] == 0.5
    (crossing,) = benchmark["against_base"]["$dapo$"]["crossings"]
    assert crossing["k"] == 9
    assert "cross at k = 9" in benchmark["against_base"]["$dapo$"]["findings"][0]


@pytest.mark.filterwarnings("error")
def test_models_that_solve_nothing_are_compared_and_prompts_cannot_steer_a_terminal(elsewhere, tmp_path, capsys):
    base = save(tmp_path / "base", [0, 0], 4, prompts=["\x1b[2JWhat is 1?", "What is 2?"])
    main([str(base), str(save(tmp_path / "dapo", [0, 0], 4, prompts=["\x1b[2JWhat is 1?", "What is 2?"]))])
    solved = save(tmp_path / "grpo", [1, 0], 4, prompts=["\x1b[2JWhat is 1?", "What is 2?"])
    main([str(base), str(solved)])
    printed = capsys.readouterr().out
    assert "No crossing: dapo and base are equal up to k = 4." in printed
    assert "\\x1b[2JWhat is 1?" in printed
    assert "\x1b" not in printed


def test_a_refusal_leaves_nothing_behind(tmp_path):
    base = save(tmp_path / "base", [1], 4)
    with pytest.raises(InputError, match="does not exist"):
        main([str(base), str(tmp_path / "absent"), "--output", str(tmp_path / "comparison")])
    assert not (tmp_path / "comparison").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--output .*file cannot be made a folder"):
        main([str(base), str(save(tmp_path / "dapo", [1], 4)), "--output", str(tmp_path / "file")])


def test_a_file_without_checksums_is_named(elsewhere, tmp_path, capsys):
    base, other = save(tmp_path / "base", [1, 0], 4), save(tmp_path / "dapo", [1, 1], 4)
    main([str(base), str(other)])
    assert "checksums" not in capsys.readouterr().out
    (file,) = other.rglob("*.parquet")
    for form in ({}, {"use_dictionary": False}, {"data_page_version": "2.0"}):
        pq.write_table(pq.read_table(file), file, **form)
        main([str(base), str(other)])
        assert capsys.readouterr().out.startswith(f"note: {file} has no checksums"), form
        pq.write_table(pq.read_table(file), file, write_page_checksum=True, **form)
        main([str(base), str(other)])
        assert "checksums" not in capsys.readouterr().out, form
