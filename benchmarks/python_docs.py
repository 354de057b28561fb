"""Text for calibrating and measuring that every Python has: the help topics of its documentation.

    python benchmarks/python_docs.py MODEL_DIR OUT

Writes OUT/measure.jsonl, the first 8 x 512 tokens, and OUT/calibrate.jsonl, 16 x 512 tokens from the 20,000th on, by
the tokenizer of MODEL_DIR.
"""

import json
import pydoc_data.topics
import sys
from pathlib import Path

from fp8serve.model.text.tokenizer import Tokenizer

ROW = 512


def write_rows(path: Path, tokenizer: Tokenizer, ids: list[int]) -> None:
    rows = [tokenizer.decode(ids[at : at + ROW]) for at in range(0, len(ids), ROW)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")


def main(model: str, out: str) -> None:
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer, folder = Tokenizer.from_dir(Path(model)), Path(out)
    ids = tokenizer.encode(text, add_special_tokens=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "measure.jsonl", tokenizer, ids[: 8 * ROW])
    write_rows(folder / "calibrate.jsonl", tokenizer, ids[20_000 : 20_000 + 16 * ROW])


if __name__ == "__main__":
    main(*sys.argv[1:])
