"""How long an engine has been silent, counted only while this process itself was running.

A front that was stopped or starved finds old heartbeats when it continues: newer ones are then still to be
read, and the age of the last one means nothing. So silence grows with the turns of the loop that counts it, by at most
a second a turn, and never exceeds the age of the last sign of life.
"""

MOST_PER_TURN = 1.0


class HeartbeatMonitor:
    """Counts the silence of one engine; `turn` is called regularly."""

    def __init__(self) -> None:
        self.silence = 0.0

    def turn(self, age: float, since_last_turn: float) -> None:
        """`age`: seconds since the last sign of life."""
        self.silence = min(self.silence + min(since_last_turn, MOST_PER_TURN), age)
