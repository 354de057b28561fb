"""The dry run lists all errors, has the counts of a real run, and does not import torch."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from safetensors import safe_open

from fp8serve.cli import main
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import load_items, total_steps
from fp8serve.train.memory import memory_estimate, parameter_counts
from fp8serve.train.methods.supervised import SftReader
from fp8serve.train.validate import MAX_LISTED, data_report, first_rows, validate

from .conftest import Configure


def test_counts_equal_those_of_a_run(configure: Configure) -> None:
    config = configure(max_steps=None, epochs=3, accumulate=2)
    report = validate(config)
    rows, expected = load_items(SftReader(), config.data, Tokenizer.from_dir(config.model), config.seq_len)
    assert report.ok
    assert report.data == expected
    assert 0 < report.trainable_fraction < 1
    assert report.steps == total_steps([r.tokens for r in rows], config) == 3 * report.steps_per_epoch
    assert report.microbatch_tokens >= report.longest_row == max(r.tokens for r in rows)


def test_every_bad_line_is_listed_by_number(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "has space.jsonl"
    path.write_text('{"text": "red"}\n{oops\n\n[1]\n{"text": "a", "prompt": "b"}\n{"text": ""}\n', encoding="utf-8")
    report = validate(configure(data=[str(path), str(tmp_path / "gone.jsonl")]))
    assert not report.ok
    assert [bad["line"] for bad in report.bad_lines] == [2, 4, 5, 6, None]
    assert all(bad["file"] == str(path) for bad in report.bad_lines[:4])
    assert report.bad_line_count == 5
    assert report.data.rows == 1


def test_a_dry_run_holds_only_the_bad_lines_that_it_lists(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("1\n" * 50_000, encoding="utf-8")
    config = configure(data=[str(path)])
    tokenizer = Tokenizer.from_dir(config.model)  # loaded here because loading takes more memory than this test allows
    monkeypatch.setattr(Tokenizer, "from_dir", lambda *_: tokenizer)
    tracemalloc.start()
    try:
        report, peak = data_report(config), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (report.bad_line_count, len(report.bad_lines)) == (50_000, MAX_LISTED)
    assert peak < 8 << 20  # 50,000 messages are 20 MiB


UNUSED = {
    "sft": '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "b"}]}' % ("a " * 99),
    "dpo": '{"prompt": "a", "chosen": "b", "rejected": "b"}',
    "grpo": json.dumps({"prompt": "a " * 99}),
}
LACKS = {
    "sft": "a token to learn from",
    "dpo": "two different completions",
    "grpo": "a prompt of at least two tokens with room for a completion",
}


@pytest.mark.parametrize(
    ("method", "field"),
    [("sft", "data"), ("sft", "eval_data"), ("dpo", "data"), ("dpo", "eval_data"), ("grpo", "data")],
)
def test_a_file_without_trainable_tokens_is_one_error(
    method: str, field: str, configure: Configure, tmp_path: Path
) -> None:
    rows = {"sft": '{"prompt": "a", "completion": "b"}', "dpo": '{"chosen": "a b", "rejected": "a c"}'}
    (tmp_path / "good.jsonl").write_text(rows.get(method, '{"prompt": "a b"}') + "\n")
    for name, content in {"empty.jsonl": "\n", "dropped.jsonl": UNUSED[method] + "\n"}.items():
        path = tmp_path / name
        path.write_text(content)
        files = {"data": [str(tmp_path / "good.jsonl")], "eval_data": []} | {field: [str(path)]}
        grader = {"grader_url": "http://localhost:1"} if method == "grpo" else {}
        report = validate(configure(method=method, seq_len=16, **files, **grader))
        (bad,) = report.bad_lines
        assert not report.ok
        assert (bad["file"], bad["line"]) == (str(path), None)
        empty = f"{path} holds no examples; it is empty."
        assert bad["message"].startswith(
            empty
            if name == "empty.jsonl"
            else f"None of the 1 examples in {path} has {LACKS[method]} within seq_len 16;"
        )


def test_a_dry_run_applies_the_row_limit(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "red"}\n' * 9))
    report = validate(configure(data=[str(path)], max_rows=8))
    assert report.bad_lines[0]["message"].startswith(f"{path} has more than 8 rows, the limit for one file;")
    assert report.data.rows == 8


def test_the_sample_marks_tokens_that_carry_loss(configure: Configure) -> None:
    (prompt, masked), (completion, has_loss) = validate(configure()).sample
    assert (masked, has_loss) == (False, True)
    assert len(prompt) == 40
    assert completion.endswith("<|end|>")


def test_dry_run_command_prints_the_report_and_does_not_train(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "red", "completion": "blue"}\n{oops\n')
    out = tmp_path / "run"
    data = str(tmp_path / "data.jsonl")
    command = ["finetune", str(model_dir), "--data", data, "--out", str(out), "--seq-len", "64", "--dry-run"]
    assert main(command) == 1
    output = capsys.readouterr().out
    assert "data.jsonl:2 is not valid JSON" in output
    assert "1 rows, " in output
    assert "red»" in output
    (tmp_path / "data.jsonl").write_text("")
    assert main(command) == 1
    assert "data.jsonl holds no examples; it is empty." in capsys.readouterr().out
    (tmp_path / "data.jsonl").write_text("{oops")
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bad_line_count"] == 1
    assert not out.exists()


def test_parameter_counts_equal_those_of_the_file(model_dir: Path) -> None:
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118 - not a mapping
    linears, others = parameter_counts(read_config(model_dir))
    assert linears == sum(n for name, n in sizes.items() if "_proj." in name)
    assert linears + others == sum(sizes.values())


def test_memory_estimate_grows_with_tokens_masters_and_accumulation(configure: Configure, model_dir: Path) -> None:
    model = read_config(model_dir)
    small = memory_estimate(model, configure(), 100, 0.5)
    assert memory_estimate(model, configure(), 200, 0.5)["activations"] == 2 * small["activations"]
    assert memory_estimate(model, configure(master_weights="optimizer"), 100, 0.5)["weights"] > small["weights"]
    one = memory_estimate(model, configure(), 1, 0.5)  # of one token, activations take less than gradients
    assert one["total"] == one["weights"] + one["casts"] + one["gradients"]
    large = memory_estimate(model, configure(), 10_000, 0.5)
    assert large["total"] == large["weights"] + large["casts"] + large["activations"] + large["logits"]
    accumulated = memory_estimate(model, configure(accumulate=2), 10_000, 0.5)
    assert accumulated["total"] == large["total"] + large["gradients"]


def test_validate_imports_no_torch() -> None:
    code = "import sys, fp8serve.train.validate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_first_rows_skips_bad_rows(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "red"}\n{oops\n{"text": "green blue"}\n{"text": "one two three"}\n', encoding="utf-8")
    config = configure(data=[str(path)])
    every = first_rows(config, config.data, 10**9)
    assert len(every) == 3
    assert len(first_rows(config, config.data, every[0].tokens + every[1].tokens)) == 2
    assert first_rows(config, config.data, every[0].tokens - 1) == []
    assert first_rows(config, [str(tmp_path / "gone.jsonl")], 100) == []
