"""How long an engine has been silent, counted only while this process itself was running.

A front that was stopped, or starved, finds old heartbeats when it goes on: what an engine said is then still to be
read, and its age says nothing. So silence grows with the turns of the loop that counts it, by a second a turn at most,
and is never more than the age of the last sign of life.
"""

MOST_PER_TURN = 1.0


class HeartbeatMonitor:
    """Of one engine; `turn` is called regularly."""

    def __init__(self) -> None:
        self.silence = 0.0

    def turn(self, age: float, since_last_turn: float) -> None:
        """`age`: seconds since the last sign of life."""
        self.silence = min(self.silence + min(since_last_turn, MOST_PER_TURN), age)
