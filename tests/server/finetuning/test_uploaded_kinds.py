"""Uploads of every file type, which are checked before a job is created."""

import gzip
import io
import json
from typing import Any
from unittest.mock import Mock

import pytest

from fp8serve.errors import DataError
from fp8serve.server.finetuning import submission
from fp8serve.server.settings import ServerLimits
from fp8serve.train.job_process import job_config
from fp8serve.train.validate import read_files
from tests.server.conftest import Server, Start
from tests.server.finetuning.test_finetune import wait_for

ROWS = [{"prompt": "red", "completion": " blue"}, {"prompt": "one", "completion": " two"}]


def parquet(columns: dict[str, list[str]]) -> bytes:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    into = io.BytesIO()
    writer.write_table(pyarrow.table(columns), into)
    return into.getvalue()


def contents() -> dict[str, bytes]:
    csv = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    return {
        "rows.csv": csv.encode(), "rows.TSV": csv.replace(",", "\t").encode(), "rows.json": json.dumps(ROWS).encode(),
        "rows.jsonl.gz": gzip.compress(lines), "rows.json.gz": gzip.compress(lines), "rows": lines,
        "rows.parquet": parquet({name: [row[name] for row in ROWS] for name in ROWS[0]}),
    }  # fmt: skip


async def upload(server: Server, name: str, content: bytes) -> dict[str, Any]:
    answer = await server.client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune"})
    assert answer.status_code == 200, answer.text
    results: dict[str, Any] = answer.json()
    return results


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.TSV", "rows.json", "rows.jsonl.gz", "rows.json.gz", "rows", "rows.parquet"]
)
async def test_every_file_type_is_accepted(name: str, start: Start) -> None:
    content = contents()[name]
    async with start() as server:
        file = await upload(server, name, content)
        report = (await server.client.post("/finetune/validate", json={"file_id": file["id"]})).json()
        assert (report["ok"], report["data"]["rows"], report["bad_lines"]) == (True, 2, [])
        job = (await server.client.post("/finetune", json={"file_id": file["id"]})).json()
        assert (await wait_for(server, job["id"], "succeeded", "failed"))["status"] == "succeeded"
        assert (await server.client.get(f"/v1/files/{file['id']}/content")).content == content
    async with start() as server:  # a start removes files without a row in the table
        assert (await server.client.get(f"/v1/files/{file['id']}/content")).status_code == 200
        assert (await server.client.delete(f"/v1/files/{file['id']}")).json()["deleted"]
        assert list((server.state.data_dir / "files").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("empty.csv", b"prompt,completion\n", "holds no examples"),
        ("other.csv", b"question,answer\na,b\n", "has only ['answer', 'question']"),
        ("wide.csv", b"text\na,b\n", "has more cells than the header"),
        ("cut.json", b'[{"text": "a"}', "is not valid JSON"),
        (
            "twice.jsonl",
            b'{"text": "a"}\n{"text": "a", "text": "b"}\n',
            ":2 is not valid JSON: the key 'text' appears twice",
        ),
        ("twice.jsonl.gz", gzip.compress(b'{"text": "a", "text": "b"}', mtime=0), "the key 'text' appears twice"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:30], "is not a complete gzip file"),
        ("no.parquet", b"PAR1 and no more", "is not a Parquet file that can be read"),
        ("rows.parquet.gz", gzip.compress(b"PAR1", mtime=0), "is neither text"),
    ],
)
async def test_an_unreadable_file_is_refused_with_the_reason(name: str, content: bytes, why: str, start: Start) -> None:
    async with start() as server:
        file = await upload(server, name, content)
        answer = await server.client.post("/finetune", json={"file_id": file["id"]})
        assert (answer.status_code, why in answer.text) == (422, True), answer.text
        assert str(server.state.data_dir) not in answer.text
        assert (await server.client.get("/finetune")).json()["jobs"] == []


@pytest.mark.parametrize("padding", [0, 1 << 20])  # read here, and by a parser process
@pytest.mark.parametrize("field", ["data", "validation_data"])
async def test_a_key_that_a_row_of_a_body_has_twice_is_refused(field: str, padding: int, start: Start) -> None:
    rows = json.dumps([ROWS[0], {"messages": [{"role": "user", "content": "a", "x": 1}]}]).replace('"x"', '"content"')
    other = "validation_data" if field == "data" else "data"
    async with start() as server:
        for route in ("/finetune", "/finetune/validate"):
            body = f'{{"{field}": {rows}, "{other}": {json.dumps(ROWS)}}}{" " * padding}'
            answer = await server.client.post(route, content=body, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["param"]) == (422, field), answer.text
            assert f"Row 2 of {field} has the key 'content' twice in one object" in answer.text


async def test_a_parquet_file_with_other_columns_is_refused(start: Start) -> None:
    async with start() as server:
        file = await upload(server, "rows.parquet", parquet({"question": ["a"], "answer": ["b"]}))
        answer = await server.client.post("/finetune", json={"file_id": file["id"]})
        assert (answer.status_code, "give one of `text`, `prompt` and `completion`" in answer.text) == (422, True)


async def test_ten_megabytes_of_one_line_are_one_row_too_large(start: Start) -> None:
    async with start() as server:
        content = b'{"text": "' + b"a" * (10 << 20) + b'"}\n'
        for name in ("rows.jsonl", "rows.csv"):
            answer = await server.client.post(
                "/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune"}
            )
            assert (answer.status_code, "Row 1 is larger" in answer.text) == (400, True)


def bombs() -> dict[str, tuple[bytes, str]]:
    """Files of a few kilobytes that hold more than 1000 rows, or a row of more than 1000 bytes."""
    row = json.dumps(ROWS[0])
    rows, long = "has more than 1,000 rows, the limit for one file", "is a row of more than 1000 bytes"
    packed = {
        "rows.jsonl.gz": (f"{row}\n" * 50_000, rows),
        "rows.json.gz": (f"[{row}{f', {row}' * 50_000}]", rows),
        "rows.csv.gz": ("prompt,completion\n" + "a,b\n" * 50_000, rows),
        "rows.txt.gz": ("a\n\n" * 50_000, "has more than 1,000 paragraphs"),
        "long.jsonl.gz": (json.dumps({"text": "a" * 50_000}), long),
        "long.json.gz": (json.dumps([{"text": "a" * 50_000}]), long),
        "blank.jsonl.gz": ("\n" * (2 << 20), "more than 1,000 blank lines"),
    }
    results = {name: (gzip.compress(text.encode()), why) for name, (text, why) in packed.items()}
    results["rows.parquet"] = parquet({"text": ["a"] * 50_000}), rows
    results["long.parquet"] = parquet({"text": ["a" * 50_000]}), long
    return results


async def test_a_compressed_validation_file_is_not_read_by_the_http_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as server:
        file = await upload(server, "held-out.jsonl.gz", gzip.compress(json.dumps(ROWS[0]).encode()))
        monkeypatch.setattr(submission, "read_files", Mock(side_effect=AssertionError("read in the front")))
        body = {"data": ROWS, "validation_file_id": file["id"]}
        report = (await server.client.post("/finetune/validate", json=body)).json()
        assert report["ok"], report
        assert (await server.client.post("/finetune", json=body)).is_success


@pytest.mark.parametrize("name", bombs())
async def test_the_contents_of_a_compressed_file_are_bounded(name: str, start: Start) -> None:
    """The limits apply on every route, and in the job's own process."""
    content, why = bombs()[name]
    assert len(content) < 20_000
    async with start(limits=ServerLimits(rows=1000, row_bytes=1000, upload_bytes=1 << 20)) as server:
        file = await upload(server, name, content)
        report = (await server.client.post("/finetune/validate", json={"file_id": file["id"]})).json()
        assert not report["ok"]
        assert why in report["bad_lines"][-1]["message"]
        for body in ({"file_id": file["id"]}, {"data": ROWS, "validation_file_id": file["id"]}):
            answer = await server.client.post("/finetune", json=body)
            assert (answer.status_code, why in answer.text) == (422, True), answer.text
        body = {"model": "tiny", "training_file": file["id"]}
        job = (await server.client.post("/v1/fine_tuning/jobs", json=body)).json()
        config = job_config(server.state.runner.job_dir(job["id"]))  # as the job's process reads it; a stub runs here
        with pytest.raises(DataError, match=why):
            read_files(config, config.data)
