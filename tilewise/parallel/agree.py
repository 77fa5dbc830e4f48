"""Before they exchange tensors, the ranks of a group tell each other what they are about to do.

A rank that is dead, late, or at another call would leave the others waiting inside a collective; one with other shapes
would make them read what was not sent. So each call, forward and backward, begins with one entry a rank in the group's
store: what it is about to do, in words. All ranks read all entries, find the same difference, and raise the same
sentence. A rank whose own arguments are refused leaves the reason as its entry. Entries that do not come in time are
those of ranks that are dead or elsewhere, and are named. It costs two round trips to the store, on the host alone; the
GPU has its queue meanwhile.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

Words = dict[str, str]
PATIENCE = 0.9  # of the group's time-out: what raises first is what names the rank
REFUSED = "refused"


class Agreement:
    """The entries of one group. Every rank must come to the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout: timedelta = group._get_backend(device).options._timeout * PATIENCE
        self.store = dist.PrefixStore("tilewise", group.get_group_store().clone())  # type: ignore[attr-defined]
        self.store.set_timeout(self.timeout)
        self.extended = self.store.has_extended_api()  # type: ignore[attr-defined]
        self.calls = 0
        if device.type == "cuda":  # NCCL's communicator is made by the first collective, which has to be everybody's
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def reach(self, words: Words) -> list[Words]:
        """All ranks' words, when they are the same but for those in capitals. ValueError: they are not, or one refused.
        RuntimeError: a rank did not come."""
        number, self.calls = self.calls, self.calls + 1
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], json.dumps(words))
            entries = self.store.multi_get(keys) if self.extended else [self.store.get(key) for key in keys]
            if number >= 2:  # all have come to the call after that one, so all have read it
                self.store.delete_key(f"{number - 2}/{self.rank}")
        except dist.DistError as error:
            self._missing(keys, error)
        answers = [json.loads(entry) for entry in entries]
        self._compare(answers)
        return answers

    def refuse(self, error: Exception) -> None:
        """Tell the others why this rank does not come. They raise it too; nobody is waited for."""
        number, self.calls = self.calls, self.calls + 1
        self.store.set(f"{number}/{self.rank}", json.dumps({REFUSED: f"{type(error).__name__}: {error}"}))

    def lost(self, peers: list[int], error: Exception) -> RuntimeError:
        """What to raise when an exchange with these ranks has failed. Perhaps because they, too, had lost one: each
        tells what it has found, and reads what the others have."""
        who = " or ".join(self.name(rank) for rank in sorted(set(peers)))
        before = []
        try:
            others = [f"lost/{rank}" for rank in range(self.size) if rank != self.rank]
            before = [self.store.get(key).decode() for key in others if self.store.check([key])]
            self.store.set(f"lost/{self.rank}", f"{self.name(self.rank)} has found that {who} is")
        except dist.DistError:
            before.append("the group's store is gone, too")
        found = f" ({'; '.join(before)})" if before else ""
        return RuntimeError(f"context parallel: {who} is gone, or sends nothing{found}: {error}")

    def name(self, rank: int) -> str:
        everywhere = dist.get_global_rank(self.group, rank)
        return f"rank {rank}" if everywhere == rank else f"rank {rank} of its group (rank {everywhere} of all)"

    def _compare(self, answers: list[Words]) -> None:
        for rank, words in enumerate(answers):
            if REFUSED in words:
                raise ValueError(f"context parallel: {self.name(rank)} raised {words[REFUSED]}")
        for what in {name: None for words in answers for name in words if not name.isupper()}:
            values = [words.get(what, "none") for words in answers]
            usual, times = Counter(values).most_common(1)[0]
            if times < self.size:
                others = [f"{self.name(rank)} has {value}" for rank, value in enumerate(values) if value != usual]
                first = self.name(values.index(usual))
                raise ValueError(f"context parallel: {what} differs: {', '.join(others)}, {first} has {usual}")

    def _missing(self, keys: list[str], error: Exception) -> NoReturn:
        try:
            late = [self.name(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        except dist.DistError:
            late = []
        who = ", ".join(late) if late else f"{self.name(0)}, or whoever keeps the group's store,"
        raise RuntimeError(
            f"context parallel: {who} did not come to this call within {self.timeout.total_seconds():.3g} s: dead, or "
            "at another call"
        ) from error


_agreements: WeakKeyDictionary[dist.ProcessGroup, Agreement] = WeakKeyDictionary()


def agreement(group: dist.ProcessGroup, device: torch.device) -> Agreement:
    """The group's own: two objects that count its calls would read each other's entries."""
    found = _agreements.get(group)
    if found is None:
        _agreements[group] = found = Agreement(group, device)
    return found
