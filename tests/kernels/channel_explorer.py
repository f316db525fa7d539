"""Every interleaving of the protocol of `_triton/peer_channels.py`, for a few ranks, programs and launches.

A program is a list of steps; each may happen at any time after the one before it. Whatever a rank's steps leave in
peers' memory follows from how far its programs are, so a state is just that. Reads and waits look at it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsa_dcp_kernels.peer_memory import SLOTS

# A step is (what, other rank). One write to all others: none of it is looked at before its flag is.
Steps = Callable[[int, int], list[tuple[str, int]]]


class Rank(NamedTuple):
    """How far a rank is: the launch that runs, and the steps done by each of its programs."""

    launch: int
    done: tuple[int, ...]


def push_then_wait(num_ranks: int, rank: int) -> list[tuple[str, int]]:
    """The protocol's steps."""
    others = [(rank + k) % num_ranks for k in range(1, num_ranks)]
    return [("write", rank)] + [(what, other) for what in ("flag", "wait", "read") for other in others]


@dataclass(frozen=True)
class Protocol:
    """What is explored.

    num_ranks: N. grids: programs of each launch, the same on every rank. places: programs of a rank that run at once.
    starts: the orders in which programs may start: "any" or "ascending"; or "opposite": descending on odd ranks.
    slots: of a channel. steps: of a program. waits_for_equal: a wait that a later epoch does not end.
    """

    num_ranks: int
    grids: Sequence[int]
    places: int
    starts: str = "any"
    slots: int = SLOTS
    steps: Steps = push_then_wait
    waits_for_equal: bool = False

    def epoch(self, launch: int, channel: int) -> int:
        """Of a channel in a launch: how many launches so far had its program."""
        return sum(grid > channel for grid in self.grids[: launch + 1])

    def explore(self) -> tuple[int, str | None]:
        """Return how many states there are, and the first thing that is wrong in one; stop there."""
        programs = [self.steps(self.num_ranks, rank) for rank in range(self.num_ranks)]
        first = tuple(Rank(0, (0,) * self.grids[0]) for _ in range(self.num_ranks))
        last = tuple(Rank(len(self.grids), ()) for _ in range(self.num_ranks))
        seen, waiting = {first}, [first]
        while waiting:
            state = waiting.pop()
            following = []
            for rank, position in enumerate(state):
                for channel, done in enumerate(position.done):
                    if done == len(programs[rank]) or (
                        not done and not self._may_start(rank, position, channel, programs)
                    ):
                        continue
                    what, other = programs[rank][done]
                    if what in ("wait", "read"):
                        epoch = self.epoch(position.launch, channel)
                        flag, slot = self._left_by(state[other], other, rank, channel, epoch, programs)
                        if what == "wait" and (flag < epoch or (self.waits_for_equal and flag != epoch)):
                            continue
                        if what == "read" and slot != epoch:
                            return len(seen), f"rank {rank} reads epoch {slot} of rank {other} for {epoch}"
                    following.append(self._advance(state, rank, channel, len(programs[rank])))
            if not following and state != last:
                return len(seen), f"nobody can go on: {state}"
            for after in following:
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen), None

    def _may_start(self, rank: int, position: Rank, channel: int, programs: list) -> bool:
        steps = len(programs[rank])
        if sum(0 < done < steps for done in position.done) >= self.places:
            return False
        if self.starts == "any":
            return True
        waiting = [other for other, done in enumerate(position.done) if not done]
        return channel == (max(waiting) if self.starts == "opposite" and rank % 2 else min(waiting))

    def _left_by(
        self, source: Rank, number: int, owner: int, channel: int, epoch: int, programs: list
    ) -> tuple[int, int]:
        """The flag of a source rank in an owner's memory, and the epoch of what lies in the slot that is read."""
        flag = self.epoch(source.launch - 1, channel)
        written = flag
        if channel < len(source.done):
            done = programs[number][: source.done[channel]]
            flag += ("flag", owner) in done
            written += ("write", number) in done
        # The last epoch written that falls into this slot.
        return flag, written - (written - epoch) % self.slots

    def _advance(self, state: tuple[Rank, ...], rank: int, channel: int, steps: int) -> tuple[Rank, ...]:
        launch, done = state[rank]
        done = (*done[:channel], done[channel] + 1, *done[channel + 1 :])
        if all(count == steps for count in done):
            # The stream's next launch begins when this one has ended.
            launch += 1
            done = (0,) * self.grids[launch] if launch < len(self.grids) else ()
        return (*state[:rank], Rank(launch, done), *state[rank + 1 :])
