"""A key file: its contents, its permissions, and the callers whom its keys identify."""

from pathlib import Path

import pytest

from fp8serve.errors import MachineError, RequestError
from fp8serve.server.access.keys import Caller, TenantLimits, admin_key, format_key_line, new_key, parse_keys, read_keys
from tests.server.access.files import write

DIGEST = "0" * 64


def test_a_key_is_found_by_its_hash_and_has_its_tenants_limits() -> None:
    text = "tenants.lab = { requests_per_minute = 3, concurrent_requests = 1 }\n"
    text += (
        format_key_line("ci", "lab", ["generate", "read", "generate"], "secret-é")
        + "\n"
        + format_key_line("b", "x", ["read"], "other")
    )
    keys = parse_keys(text.encode())
    limits = TenantLimits(requests_per_minute=3, concurrent_requests=1)
    assert keys.caller("secret-é".encode()) == Caller("ci", "lab", ("generate", "read"), limits)
    assert keys.caller(b"other") == Caller("b", "x", ("read",), TenantLimits())
    for unknown in (b"", b"secret", b"secret-\xe9", DIGEST.encode()):
        assert keys.caller(unknown) is None
    assert "secret" not in text
    assert "digests" not in repr(keys)


def test_keys_are_long_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 50 for key in keys)


def test_the_single_key_may_do_everything() -> None:
    caller = admin_key("k").caller(b"k")
    assert caller is not None
    assert (caller.tenant, caller.scopes) == ("default", ("admin",))
    assert admin_key("k").caller(b"") is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[keys", "it is not valid TOML"),
        ("keys = 3", "keys must be a table, not 3"),
        ("key.ci = {}", "it has 'key', but only keys and tenants are allowed."),
        ("keys.ci = 3", "keys.ci: Key must be an object, not int"),
        ("keys.ci = { tenant = 't', scopes = ['read'] }", "keys.ci: it lacks sha256."),
        (f"keys.ci = {{ tenant = 't', scopes = [], sha256 = '{DIGEST}' }}", "scopes is empty"),
        (f"keys.ci = {{ tenant = 't', scopes = ['all'], sha256 = '{DIGEST}' }}", "'admin', not 'all'"),
        (
            f"keys.ci = {{ tenant = 't', scopes = 'read', sha256 = '{DIGEST}' }}",
            "keys.ci: scopes must be a list, not 'read'.",
        ),
        (f"keys.ci = {{ tenant = 't', scope = 'read', sha256 = '{DIGEST}' }}", "no field 'scope'"),
        (f"keys.'c i' = {{ tenant = 't', scopes = ['read'], sha256 = '{DIGEST}' }}", "unlike 'c i'"),
        (f"keys.ci = {{ tenant = '', scopes = ['read'], sha256 = '{DIGEST}' }}", "unlike ''"),
        ("keys.ci = { tenant = 't', scopes = ['read'], sha256 = 'plain' }", "64 hexadecimal digits"),
        ("tenants.t = { requests_per_minute = 0 }", "tenants.t: requests_per_minute must be at least"),
        ("tenants.t = { requests = 1 }", "tenants.t: TenantLimits has no field 'requests'"),
        ("tenants.t = { tokens_per_minute = true }", "tokens_per_minute must be a whole number"),
        (
            f"keys.a = {{ tenant = 't', scopes = ['read'], sha256 = '{DIGEST}' }}\n"
            f"keys.b = {{ tenant = 't', scopes = ['admin'], sha256 = '{DIGEST}' }}",
            "keys.b and keys.a are the same key.",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        parse_keys(text.encode())
    assert sentence in str(refused.value)
    with pytest.raises(MachineError, match=r"The file of keys .* is invalid: "):
        read_keys(write(tmp_path / "keys.toml", text))


def test_a_file_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        parse_keys(b"\xff\xfe")


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o600, True), (0o400, True), (0o440, True), (0o644, False), (0o660, False), (0o601, False)]
)
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int, fine: bool) -> None:
    path = write(tmp_path / "keys.toml", format_key_line("ci", "lab", ["read"], "k"))
    path.chmod(mode)
    if fine:
        assert read_keys(path).caller(b"k")
    else:
        with pytest.raises(MachineError, match=f"mode {mode:o}.*chmod 600"):
            read_keys(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none.toml")
