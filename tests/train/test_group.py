"""The message of a rank that ends because another rank of its group has ended."""

import pytest

from fp8serve.train import group


def _fail(arguments: list[str]) -> int:
    raise RuntimeError(f"Read error [127.0.0.1]:1: {arguments[0]}. Check the logs of the remote worker.")


@pytest.mark.parametrize(("error", "is_peer"), [("Connection reset by peer", True), ("Something is wrong", False)])
def test_a_lost_connection_is_reported_in_one_sentence_and_other_errors_keep_their_traceback(
    error: str, is_peer: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(group, "_die_with_parent", lambda parent: None)
    assert group.main(["1", "status", f"{__name__}:_fail", error]) == 1
    stderr = capsys.readouterr().err
    assert ("Traceback" in stderr) is not is_peer
    assert (stderr == "fp8serve: this process ends because another process of the group has ended.\n") is is_peer
