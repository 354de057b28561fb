"""Measure the decoding of one sequence with and without drafts: a summary, an edit, code, a story.

Drafts come from the text so far, or from a draft model.

\b
Examples:
  fp8serve bench speculation ./llama-fp8
  fp8serve bench speculation ./llama-fp8 --speculative-tokens 4 --temperature 0.7 --out figures
  fp8serve bench speculation ./llama-fp8 --draft-model ./small-llama-fp8
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.bench.options import SpeculationLoad
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, Model, print_table


@with_options()
def command(model: Model, options: Chosen[SpeculationLoad], out: Out = None, json: AsJson = False) -> None:
    from fp8serve.hub import draft_found, find_model

    directory, load = find_model(model), options()
    from fp8serve.bench.speculation import measure

    chosen = draft_found(vars(load))
    figures = measured("Speculation", lambda tell: measure(directory, tell, **chosen))
    show(publish("speculation", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    rows = [
        (
            found["text"],
            f"{found['plain_tokens_per_second']:.1f}",
            f"{found['speculative_tokens_per_second']:.1f}",
            f"{found['times_plain']:.2f}",
            f"{found['accepted']} of {found['drafted']}",
            found["steps"],
            "yes" if found["same_answer"] else "NO",
        )
        for found in result["texts"]
    ]
    print_table(("text", "plain tokens/s", "drafts tokens/s", "times", "accepted", "steps", "same answer"), rows)
