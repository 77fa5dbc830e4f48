"""Processes that are the ranks of a process group: a pool that runs functions on all of them at once.

Workers come from a forkserver, which imports torch once; the store is in this process, so that it outlives any rank.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import tilewise

HOST = "127.0.0.1"


class Ranks:
    """`size` processes and a group of all of them, whose time-out is `timeout` seconds.

    backend: "gloo" on the CPU, or "nccl", a GPU a rank.
    """

    def __init__(self, size: int, timeout: float, backend: str = "gloo"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tilewise.parallel", "tilewise.algorithm.tiled"])
        self.store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, size, self.store.port, timeout, backend)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def results(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What function(*args) returns on each rank, or the exception that it raises; None of a rank that is dead."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers: list[Any] = [None] * len(self.pipes)
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=240)
            assert ready, f"ranks {sorted(waiting.values())} hang in {function.__name__}{args}"
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    continue
        return answers

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`results`, none of which may be an exception."""
        answers = self.results(function, *args)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Exception):
                raise AssertionError(f"rank {rank}: {answer}") from answer
        return answers

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(20)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: float, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.TCPStore(HOST, port, size, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            with tilewise.checked():
                answer = function(*args)
        except Exception as error:
            error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
            answer = error
        pipe.send(answer)
