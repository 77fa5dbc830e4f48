"""A process that takes one call at a time, and is replaced when it dies, hangs or has lost its GPU.

A kernel that reads out of bounds poisons its whole process: every later call fails. So what may fail runs in a worker,
and the one that counts the results never touches the GPU.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any


class Failed(RuntimeError):
    """A call raised, its process died, or it took too long; the text says which."""


class Worker:
    """`ask(function, *args)` runs a module's function in the process and returns what it returns, or raises Failed."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection

    def ask(self, function: Callable[..., Any], *args: Any, seconds: float) -> Any:
        if self._process is None or not self._process.is_alive():
            self._start()
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(max(seconds, 0.0)):
                self.stop()
                raise Failed(f"no answer within {seconds:.0f} s")
            good, answer, healthy = self._pipe.recv()
        except (EOFError, OSError) as error:
            process = self._process
            process.join(10)
            self.stop()
            raise Failed(f"the process died (exit code {process.exitcode})") from error
        if not healthy:
            self.stop()
        if not good:
            raise Failed(answer)
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()


def parallel(
    function: Callable[..., Any], arguments: Iterable[Any], processes: int, deadline: float, seconds: float = 120.0
) -> Iterator[tuple[Any, Any]]:
    """(argument, what function(argument) returned or a Failed) as they come, from `processes` workers.

    deadline: of time.monotonic(); what has not begun by then fails with that reason, what runs then is stopped.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    count = 0
    for argument in arguments:
        waiting.put(argument)
        count += 1

    def work() -> None:
        worker = Worker()
        while True:
            try:
                argument = waiting.get_nowait()
            except queue.Empty:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                answers.put((argument, Failed("skipped: out of time")))
                continue
            try:
                answers.put((argument, worker.ask(function, argument, seconds=min(seconds, left))))
            except Failed as failed:
                answers.put((argument, failed))
        worker.stop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(processes, count))]
    for thread in threads:
        thread.start()
    for _ in range(count):
        yield answers.get()
    for thread in threads:
        thread.join()


def reason(error: BaseException) -> str:
    """One line: the kind of error and the start of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(*args)
        except Exception as error:  # whatever a kernel or its compiler raises is the answer
            traceback.print_exc()
            pipe.send((False, reason(error), _healthy()))
        else:
            pipe.send((True, answer, True))


def _healthy() -> bool:
    """Whether the GPU still answers this process."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    torch.cuda.empty_cache()
    return True
