"""Programs that run kernels of their own on the emulated GPU (emulator/program.h): small, and compiled in seconds."""

import os
import subprocess
from pathlib import Path

from tests.cuda import emulated

RACE = 66  # ThreadSanitizer's exit status


class Program:
    def __init__(self, source: Path) -> None:
        self.source = source
        sources = [source, emulated.EMULATOR / "settings.cpp", emulated.EMULATOR / "stack.cpp"]
        self._plain = emulated.Build(source.stem, ["-O1"], sources, is_program=True)
        self._racing = emulated.Build(f"{source.stem}-races", emulated.THREAD_SANITIZER, sources, is_program=True)

    def run(self, what: str | Path, seed: int = 0, backwards: bool = False) -> tuple[str, list[str]]:
        """Returns the results or the emulator's error, and the barriers and waits that were reached."""
        command = [str(emulated.build(self._plain)), str(what), str(seed), str(int(backwards))]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode in (0, 1), process.stdout + process.stderr
        first, *sites = process.stdout.splitlines()
        return first, sites

    def race(self, what: str | Path, seed: int = 0, left_out: str = "") -> str:
        """Returns ThreadSanitizer's report of the first race, or "" if the program ended without race and error.

        The barrier or wait `left_out` orders nothing.
        """
        command = ["setarch", "-R", str(emulated.build(self._racing)), str(what), str(seed), "0", left_out]
        settings = {**os.environ, "TSAN_OPTIONS": emulated.THREAD_SANITIZER_OPTIONS}
        process = subprocess.run(command, env=settings, capture_output=True, text=True)
        assert process.returncode in (0, RACE), process.stdout + process.stderr
        return process.stderr if process.returncode else ""

    def line_at(self, site: str) -> str:
        name, number = site.split(":")
        [path] = [path for path in [*emulated.HEADERS, self.source] if path.name == name]
        return path.read_text().splitlines()[int(number) - 1]
