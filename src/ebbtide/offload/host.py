"""The host tier's slots: which chunk is where, and which one makes room.

States of a slot::

    free --reserve--> filling --filled--> ready --evicted, dropped--> free
                         |                  | dropped while pinned
                         | dropped          v
                         +------------> draining --last user gone--> free

Only ``ready`` slots are found. A ready slot without pins may be evicted at any time, one with pins
never. Pins are held by loads that read the slot, and by writes to the tiers below.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ebbtide.offload.policies import LRU, EvictionPolicy


class SlotState(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    key: bytes = b""
    pins: int = 0
    leaving: bool = False  # chosen to make room: the policy knows it no more

    @property
    def is_kept(self) -> bool:
        """Whether pins, and nothing else, keep its chunk from being chosen to leave."""
        return self.state is SlotState.READY and self.pins > 0 and not self.leaving


class HostSlots:
    """``num_slots`` slots of one chunk each."""

    def __init__(self, num_slots: int, policy: EvictionPolicy | None = None) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = list(range(num_slots - 1, -1, -1))
        self._at: dict[bytes, int] = {}  # filling and ready chunks
        self._policy: EvictionPolicy = LRU() if policy is None else policy

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def pins(self) -> int:
        return sum(slot.pins for slot in self._slots)

    def has(self, key: bytes) -> bool:
        """Whether the chunk is ready to be loaded."""
        at = self._at.get(key)
        return at is not None and self._slots[at].state is SlotState.READY

    def holds(self, key: bytes) -> bool:
        """Whether the chunk is ready or being filled."""
        return key in self._at

    def slot_of(self, key: bytes) -> int | None:
        """Where the chunk is ready or being filled."""
        return self._at.get(key)

    def reserve(self, key: bytes) -> int | None:
        """A slot to fill with the chunk, evicting one if need be; None where all are in use."""
        assert key not in self._at, "the chunk is there already"
        if not self._free:
            victim = self.take_victim()
            if victim is None:
                return None
            self.evict(victim)
        at = self._free.pop()
        slot = self._slots[at]
        slot.state, slot.key = SlotState.FILLING, key
        self._at[key] = at
        return at

    def take_victim(self) -> bytes | None:
        """Choose a ready chunk without pins to make room. It can still be used until ``evict``."""
        victim = self._policy.victim()
        if victim is not None:
            self._slots[self._at[victim]].leaving = True
        return victim

    def evict(self, key: bytes) -> None:
        """The chunk that was chosen leaves; its slot is free once nobody uses it."""
        self.evictions += 1
        self.drop(key)

    def best_first(self) -> list[bytes]:
        """All ready chunks, those that would go first last. Those without pins are all chosen to leave."""
        in_use = [key for key, at in self._at.items() if self._slots[at].is_kept]
        return in_use + list(iter(self.take_victim, None))[::-1]

    def filled(self, at: int, good: bool) -> None:
        """The store into the slot has returned."""
        slot = self._slots[at]
        if slot.state is SlotState.FILLING and good:
            slot.state = SlotState.READY
            self._policy.add(slot.key)
            return
        if slot.state is SlotState.FILLING:
            del self._at[slot.key]
        else:
            assert slot.state is SlotState.DRAINING, f"slot {at} is {slot.state.name}"
        self._free_slot(at)

    def pin(self, key: bytes) -> int:
        """The slot of a ready chunk, which stays as it is until ``unpin``."""
        at = self._at[key]
        slot = self._slots[at]
        assert slot.state is SlotState.READY, f"slot {at} is {slot.state.name}"
        if slot.pins == 0 and not slot.leaving:
            self._policy.pin(key)
        slot.pins += 1
        return at

    def unpin(self, at: int) -> None:
        slot = self._slots[at]
        assert slot.pins > 0, f"slot {at} was unpinned more often than pinned"
        slot.pins -= 1
        if slot.pins == 0:
            if slot.state is not SlotState.READY:
                self._free_slot(at)
            elif not slot.leaving:
                self._policy.unpin(slot.key)

    def touch(self, key: bytes) -> None:
        """The chunk was useful. No-op where it is not there."""
        self._policy.touch(key)

    def drop(self, key: bytes) -> None:
        """The chunk is found no more; its slot is free once nobody uses it. No-op where it is not there."""
        at = self._at.pop(key, None)
        if at is None:
            return
        slot = self._slots[at]
        if slot.state is SlotState.READY and not slot.leaving:
            self._policy.remove(key)
        if slot.state is SlotState.FILLING or slot.pins:
            slot.state = SlotState.DRAINING
        else:
            self._free_slot(at)

    def clear(self) -> None:
        for key in list(self._at):
            self.drop(key)

    def _free_slot(self, at: int) -> None:
        slot = self._slots[at]
        slot.state, slot.key, slot.leaving = SlotState.FREE, b"", False
        self._free.append(at)

    def __repr__(self) -> str:
        return f"<HostSlots {self.in_use}/{self.num_slots} in use, {self.pins} pins>"
