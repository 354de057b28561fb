"""Files of keys for tests."""

from pathlib import Path

from fp8serve.server.access.keys import SCOPES, format_key_line


def write(path: Path, *lines: str) -> Path:
    """Writes a key file of these lines with the mode that `key new` gives it; returns its path."""
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


def key_of(scope: str) -> str:
    """Returns the key that `one_for_each_scope` writes for a scope."""
    return f"the-key-for-{scope}"


def one_for_each_scope(path: Path, *more: str) -> Path:
    """Writes a key file with a key for every scope, whose tenant has the scope's name."""
    return write(path, *(format_key_line(f"{scope}-key", scope, [scope], key_of(scope)) for scope in SCOPES), *more)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
