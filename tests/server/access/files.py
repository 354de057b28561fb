"""Files of keys for tests."""

from pathlib import Path

from fp8serve.server.access.keys import SCOPES, format_key_line


def write(path: Path, *lines: str) -> Path:
    """A file of these lines, as `key new` would leave it."""
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


def key_of(scope: str) -> str:
    """The key of that scope in `one_for_each_scope`."""
    return f"the-key-for-{scope}"


def one_for_each_scope(path: Path, *more: str) -> Path:
    """A file with a key for every scope, of a tenant named as the scope."""
    return write(path, *(format_key_line(f"{scope}-key", scope, [scope], key_of(scope)) for scope in SCOPES), *more)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
