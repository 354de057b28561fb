"""What a dry run of a fine-tune found, for a person: of this machine's own, or of a server's."""

from collections.abc import Mapping
from typing import Any

from fp8serve.terminal import printable

LEARNT = ("»", "«")


def show(report: Mapping[str, Any]) -> None:
    """`report`: the fields of `train.validate.ValidationReport`."""
    for bad in report["bad_lines"]:
        print(printable(bad["message"]))
    if more := report["bad_line_count"] - len(report["bad_lines"]):
        print(f"... and {more} more rows that are wrong")
    data, memory = report["data"], report["memory_bytes"]["total"]
    print(
        f"{data['rows']} rows, {data['tokens']} tokens, {report['trainable_fraction']:.0%} of them learnt; "
        f"{report['steps']} steps; about {memory / 2**30:.1f} GiB of memory"
    )
    if report["sample"]:
        print(f"The first row, with what is learnt between {LEARNT[0]} and {LEARNT[1]}:")
        pieces = (f"{LEARNT[0]}{text}{LEARNT[1]}" if learnt else text for text, learnt in report["sample"])
        print(printable("".join(pieces)))
