"""Runs a server as its own process: `python -m tests.server.serve JSON`, JSON being settings, `fd`, `fake`, `delay`,
`open_files` (of the process, soft and hard limit), `umask`, `stub` (whether jobs run tests/server/stub_worker.py),
`lease_seconds`."""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from fp8serve.errors import Fp8ServeError
from fp8serve.server import app
from fp8serve.server.finetuning import fronts
from fp8serve.server.launch import adopt, run
from fp8serve.server.named_models import NamedAdapter, NamedModel
from fp8serve.server.settings import ServerLimits, Settings
from tests.server.conftest import STUB
from tests.server.fakes import FakeEngine, Launcher


def main(options: dict[str, Any]) -> int:
    fake, delay, gate = options.pop("fake", False), options.pop("delay", 0.0), options.pop("gate", None)
    if (files := options.pop("open_files", None)) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(files))
    os.umask(options.pop("umask", 0o022))
    fronts.LEASE_SECONDS = options.pop("lease_seconds", fronts.LEASE_SECONDS)
    if options.pop("stub", False):
        app.training_command = lambda processes: STUB
    paths = {name: Path(options[name]) for name in ("model", "data_dir", "api_keys", "models_dir") if name in options}
    models = tuple(map(NamedModel.parse, options.pop("models", ())))
    adapters = tuple(map(NamedAdapter.parse, options.pop("adapters", ())))
    limits = ServerLimits(**options.pop("limits", {}))
    listener = adopt(options.pop("fd")) if "fd" in options else None
    engines = Launcher(lambda: FakeEngine(delay=delay, gate=gate)) if fake else None
    try:
        run(Settings(**options | paths, limits=limits, models=models, adapters=adapters), engines, listener)
    except Fp8ServeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
