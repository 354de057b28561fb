"""A dry run: what a job would do and what it would cost, without loading a weight (or torch).

Everything wrong with the data, held-out data included, is listed, by file and line, instead of only the first: that is
the difference from a run, which stops at the first bad line. The memory figure is an estimate from sizes (memory.py
says what it counts).
"""

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fp8serve.errors import DataError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.data_files import DataLimits, Rows, read_source
from fp8serve.model.text.examples import some
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Item, Row, RowCounts, check_length, epoch_steps, nothing_to_learn, total_steps
from fp8serve.train.memory import check_layers, memory_estimate
from fp8serve.train.methods.interface import Reader
from fp8serve.train.methods.table import reader_of
from fp8serve.train.reporting import check_states

MAX_LISTED = 100  # bad lines described one by one
TOGETHER = 64  # examples that are tokenized at once


@dataclass(frozen=True)
class DataReport:
    """What the data of a job contain.

    bad_lines: {"file", "line" (from 1, None for a whole file), "message"} of the first hundred; bad_line_count of all.
    data: counts as a run reports them. steps: optimizer steps of the job. longest_row and microbatch_tokens in tokens.
    sample: the first row as [text, carries loss] pieces.
    """

    ok: bool
    bad_lines: list[dict[str, Any]]
    bad_line_count: int
    data: RowCounts
    trainable_fraction: float
    steps: int
    steps_per_epoch: int
    longest_row: int
    microbatch_tokens: int
    sample: list[tuple[str, bool]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


@dataclass(frozen=True)
class ValidationReport(DataReport):
    """What a dry run found. memory_bytes: estimate by part, of one process."""

    memory_bytes: dict[str, int]


def validate(config: TrainConfig, processes: int = 1) -> ValidationReport:
    """Look at the model's configuration and all data, for a run of so many processes.

    Raises ModelError, RecipeError or JobError; bad data are in the report.
    """
    model = read_config(config.model)
    check_length(config.seq_len, model)
    check_layers(config, model)
    check_states(config)
    result = look_at_data(config)
    memory = memory_estimate(model, config, result.microbatch_tokens, result.trainable_fraction, processes)
    return ValidationReport(**vars(result), memory_bytes=memory)


def read_files(config: TrainConfig, files: Sequence[str]) -> None:
    """Parses files as the job's method reads them, and tokenizes nothing. DataError: the first thing that is wrong."""
    reader = reader_of(config)
    for path in files:
        deque(reader.file(path, config.data_limits), maxlen=0)


def some_rows(config: TrainConfig, files: Sequence[str], most: int) -> list[Row]:
    """The first rows of files, with at most `most` tokens together; of a pair, the row of the better answer. Bad rows
    are skipped, and no more is read than is needed."""
    tokenizer, reader = Tokenizer.from_dir(config.model, config.today), reader_of(config)
    results: list[Row] = []
    for _, _, example in (e for name in files for e in _examples(reader, name, config.data_limits)):
        try:
            items = [] if isinstance(example, DataError) else reader.items([example], tokenizer, config.seq_len)[0]
        except DataError:
            continue
        for row in (item.rows[0] for item in items):
            if sum(r.tokens for r in results) + row.tokens > most:
                return results
            results.append(row)
    return results


def look_at_data(config: TrainConfig) -> DataReport:
    """As `validate`, but without the model's configuration, because reading that may take another process."""
    tokenizer = Tokenizer.from_dir(config.model, config.today)
    bad = _BadLines()
    items, report = _good_items(config, config.data, tokenizer, bad)
    _good_items(config, config.eval_data, tokenizer, bad)
    lengths = [item.tokens for item in items]
    microbatch = max((sum(lengths[i] for i in m) for s in epoch_steps(lengths, config, 0) for m in s), default=0)
    return DataReport(
        ok=bool(items) and not bad.count,
        bad_lines=bad.listed,
        bad_line_count=bad.count,
        data=report,
        trainable_fraction=report.trainable_fraction,
        steps=total_steps(lengths, config) if items else 0,
        steps_per_epoch=len(epoch_steps(lengths, config, 0)),
        longest_row=max((row.tokens for item in items for row in item.rows), default=0),
        microbatch_tokens=microbatch,
        sample=[piece for item in items[:1] for row in item.rows for piece in _marked(row, tokenizer)],
    )


class _BadLines:
    """listed: the first MAX_LISTED of `count`, because a file may have millions."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self.count = 0

    def add(self, file: str, line: int | None, error: DataError | str) -> None:
        self.count += 1
        if self.count <= MAX_LISTED:
            self.listed.append({"file": file, "line": line, "message": str(error)})


def _good_items(
    config: TrainConfig, files: Sequence[str], tokenizer: Tokenizer, bad: _BadLines
) -> tuple[list[Item], RowCounts]:
    """The items of `files`. Adds to `bad` what is wrong: rows, files without a row, or that nothing can be learnt."""
    items: list[Item] = []
    before = bad.count
    reader, report = reader_of(config), RowCounts(0, 0, 0, 0, 0, 0)
    examples = (e for name in files for e in _examples(reader, name, config.data_limits))
    while group := list(islice(examples, TOGETHER)):
        for created, counts in _items(group, lambda result: reader.items(result, tokenizer, config.seq_len), bad):
            items += created
            report = RowCounts(*(getattr(report, name) + getattr(counts, name) for name in _COUNTS))
    if files and not items and bad.count == before:
        bad.add(files[0], None, nothing_to_learn(reader, report.examples, files, config.seq_len))
    return items, report


def _items(group: Sequence["_Example"], make: "_Make", bad: _BadLines) -> Iterator[tuple[list[Item], RowCounts]]:
    """Those of a whole group, whose conversations are then rendered together, or of each example if one is bad."""
    examples = [result for *_, result in group]
    problem = next((str(result) for result in examples if isinstance(result, DataError)), "")
    try:
        created = None if problem else make(examples)
    except DataError as error:
        created, problem = None, str(error)
    if created is not None:
        yield created
    elif len(group) == 1:
        bad.add(*group[0][:2], problem)
    else:
        for one in group:
            yield from _items([one], make, bad)


_Make = Callable[[list[Any]], tuple[list[Item], RowCounts]]
_COUNTS = [field.name for field in dataclasses.fields(RowCounts)]
_Example = tuple[str, int | None, Any]


def _examples(reader: Reader[Any, Any], argument: str, limits: DataLimits) -> Iterator[_Example]:
    """(file, line, example), with an error in place of each row that is no example, and of what cannot be read."""
    try:
        source = read_source(argument, reader.columns, limits)
        if isinstance(source, Rows):
            rows = ((argument, number, _parse(reader, row, f"{argument}:{number}")) for number, row in source.rows)
            yield from some(rows, argument)
        else:
            yield from ((argument, None, example) for example in reader.file(argument, limits))
    except DataError as error:
        yield argument, None, error


def _parse(reader: Reader[Any, Any], row: str | Mapping[str, Any], where: str) -> Any:
    try:
        return reader.row(row, where)
    except DataError as error:
        return error


def _marked(row: Row, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The row's text in pieces, each with whether it carries loss."""
    pieces: list[tuple[list[int], bool]] = []
    for token, learnt in zip(row.ids.tolist(), row.loss.tolist(), strict=True):
        if not pieces or pieces[-1][1] != learnt:
            pieces.append(([], learnt))
        pieces[-1][0].append(token)
    return [(tokenizer.decode(ids, skip_special_tokens=False), learnt) for ids, learnt in pieces]
