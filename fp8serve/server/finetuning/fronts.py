"""The servers that share a PostgreSQL database: their leases, and the activations that they make together.

A server renews its lease every POLL_SECONDS. When it has been silent for LEASE_SECONDS by the database's clock, its
lease ends, and other servers may claim its jobs (`JobStore.claim`). A server that returns before that keeps its jobs.

Weights are activated in two phases, so that all servers serve them or none. First, every server that has a lease and
serves the model loads and verifies the weights beside those it serves, and votes. When all have voted "loaded", one
transaction writes the new weights into the table `activated` and sets the swap's state to "switched"; then each server
swaps, which cannot fail. A server that cannot load the weights aborts the swap, and nothing changes anywhere. A server
whose lease ends meanwhile no longer counts: it loads the active weights when it returns. Any server can make the
decision, so none has to survive.
"""

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.database import Connection, Database
from fp8serve.server.finetuning.job_store import activate

LEASE_SECONDS = 30.0
POLL_SECONDS = 1.0
KEEP_SECONDS = 3600.0
"""How long ended leases and decided swaps stay in the database, for people who look into it."""


@dataclass(frozen=True)
class Swap:
    """An activation of the weights `source` for `model` by all servers. `is_alone` says that only one takes part."""

    id: str
    model: str
    source: str
    max_ratio: float
    is_alone: bool = False


@dataclass(frozen=True)
class Decision:
    """The state of a swap, and the reason if it is aborted."""

    state: Literal["loading", "switched", "aborted"]
    reason: str | None = None


@dataclass(frozen=True)
class Fronts:
    """The tables of servers and swaps. Every call blocks."""

    database: Database

    def renew(self, models: Iterable[str]) -> bool:
        """Begins or extends the lease of this server, which now serves `models`. Returns whether it was extended."""
        now = self.database.now
        with self.database.write() as db:
            has_lease = f"SELECT 1 FROM fronts WHERE id = ? AND expires_at > {now}"
            is_extended = db.execute(has_lease, (self.database.front,)).fetchone() is not None
            lease = f"INSERT INTO fronts VALUES (?, ?, {now} + {LEASE_SECONDS}) ON CONFLICT (id) DO UPDATE"
            values = self.database.front, json.dumps(sorted(models))
            db.execute(f"{lease} SET models = excluded.models, expires_at = excluded.expires_at", values)
            db.execute(f"DELETE FROM fronts WHERE expires_at < {now} - {KEEP_SECONDS}")
            old = f"SELECT id FROM swaps WHERE expires_at < {now} - {KEEP_SECONDS} AND state != 'loading'"
            db.execute(f"DELETE FROM votes WHERE swap IN ({old})")
            db.execute(f"DELETE FROM swaps WHERE id IN ({old})")
        return is_extended

    def leave(self) -> None:
        """Ends the lease of this server."""
        with self.database.write() as db:
            db.execute("DELETE FROM fronts WHERE id = ?", (self.database.front,))

    # -- swaps ---------------------------------------------------------------------------------------------------------

    def propose(self, model: str, source: str, max_ratio: float, seconds: float) -> Swap:
        """Begins a swap, for which the servers have `seconds` to load the weights. Raises Fault 409 while another swap
        of the model is open."""
        now, swap_id = self.database.now, secrets.token_hex(8)
        with self.database.write() as db:
            open_swaps: list[Any] = db.execute(
                "SELECT id FROM swaps WHERE model = ? AND state = 'loading'", (model,)
            ).fetchall()
            if any(self._decide(db, row["id"]).state == "loading" for row in open_swaps):
                hint = "Try again when that activation has finished."
                raise Fault(Code.ALIAS_BUSY, "Other weights are already being activated for this model.", hint=hint)
            rows: list[Any] = db.execute(f"SELECT * FROM fronts WHERE expires_at > {now}").fetchall()
            voters = {row["id"] for row in rows if model in json.loads(row["models"])} | {self.database.front}
            values = swap_id, model, source, max_ratio
            db.execute(f"INSERT INTO swaps VALUES (?, ?, ?, ?, 'loading', NULL, {now} + {float(seconds)})", values)
            for front in voters:
                state = "joined" if front == self.database.front else "invited"
                db.execute("INSERT INTO votes VALUES (?, ?, ?)", (swap_id, front, state))
        return Swap(swap_id, model, source, max_ratio, is_alone=len(voters) == 1)

    def invitations(self) -> list[Swap]:
        """Returns the open swaps in which this server shall take part and does not yet, and marks them as joined."""
        mine = "votes.front = ? AND votes.state = 'invited' AND swaps.state = 'loading'"
        query = f"SELECT swaps.* FROM swaps JOIN votes ON votes.swap = swaps.id WHERE {mine}"
        rows = self.database.rows(query, self.database.front)
        for row in rows:
            self._vote(row["id"], "joined")
        return [Swap(row["id"], row["model"], row["source"], row["max_ratio"]) for row in rows]

    def set_loaded(self, swap: Swap) -> None:
        """Votes that this server has loaded and verified the weights."""
        self._vote(swap.id, "loaded")

    def set_swapped(self, swap: Swap) -> None:
        """Reports that this server serves the weights."""
        self._vote(swap.id, "swapped")

    def withdraw(self, swap: Swap) -> None:
        """Takes no part in the swap any more, because this server ends."""
        with self.database.write() as db:
            db.execute("DELETE FROM votes WHERE swap = ? AND front = ?", (swap.id, self.database.front))

    def abort(self, swap: Swap, reason: str) -> None:
        """Aborts the swap for all servers, unless it was decided already."""
        with self.database.write() as db:
            _abort(db, swap.id, reason)

    def decide(self, swap: Swap) -> Decision:
        """Switches to the new weights if every server with a lease has loaded them. Returns the state of the swap."""
        with self.database.write() as db:
            return self._decide(db, swap.id)

    def roll_back(self, swap: Swap, source: str) -> None:
        """Activates `source` in place of the swap's weights, unless others have been activated since."""
        with self.database.write() as db:
            row: Any = db.execute("SELECT source FROM activated WHERE base = ?", (swap.model,)).fetchone()
            if row is not None and row["source"] == swap.source:
                activate(db, swap.model, source)

    def is_complete(self, swap: Swap) -> bool:
        """Whether every server that loaded the weights and still has a lease serves them."""
        with self.database.write() as db:
            return "loaded" not in self._votes(db, swap.id)

    def _vote(self, swap_id: str, state: str) -> None:
        with self.database.write() as db:
            db.execute("UPDATE votes SET state = ? WHERE swap = ? AND front = ?", (state, swap_id, self.database.front))

    def _decide(self, db: Connection, swap_id: str) -> Decision:
        is_late = f"expires_at < {self.database.now} AS is_late"
        swap: Any = db.execute(f"SELECT swaps.*, {is_late} FROM swaps WHERE id = ?", (swap_id,)).fetchone()
        if swap["state"] != "loading":
            return Decision(swap["state"], swap["reason"])
        votes = self._votes(db, swap_id)
        if votes and votes <= {"loaded"}:
            db.execute("UPDATE swaps SET state = 'switched' WHERE id = ?", (swap_id,))
            activate(db, swap["model"], swap["source"])
            return Decision("switched")
        if swap["is_late"] or not votes:
            reason = "They were not loaded in time." if votes else "The servers that loaded them have ended."
            _abort(db, swap_id, reason)
            return Decision("aborted", reason)
        return Decision("loading")

    def _votes(self, db: Connection, swap_id: str) -> set[str]:
        """Returns the votes of the servers that have a lease."""
        live = f"fronts.expires_at > {self.database.now}"
        query = f"SELECT votes.state FROM votes JOIN fronts ON fronts.id = votes.front WHERE swap = ? AND {live}"
        rows: list[Any] = db.execute(query, (swap_id,)).fetchall()
        return {row["state"] for row in rows}


def _abort(db: Connection, swap_id: str, reason: str) -> None:
    db.execute("UPDATE swaps SET state = 'aborted', reason = ? WHERE id = ? AND state = 'loading'", (reason, swap_id))
