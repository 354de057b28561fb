"""What a rank of a group says when it ends early."""

import pytest

from fp8serve.train import group


def _loses_its_peer(arguments: list[str]) -> int:
    raise RuntimeError(f"Read error [127.0.0.1]:1: {arguments[0]}. Check the logs of the remote worker.")


@pytest.mark.parametrize(("what", "is_peer"), [("Connection reset by peer", True), ("Something is wrong", False)])
def test_a_rank_whose_peer_died_says_one_sentence(
    what: str, is_peer: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(group, "_die_with_parent", lambda parent: None)
    assert group.main(["1", "status", f"{__name__}:_loses_its_peer", what]) == 1
    said = capsys.readouterr().err
    assert ("Traceback" in said) is not is_peer
    assert (said == "fp8serve: this process ends because another process of the group has ended.\n") is is_peer
