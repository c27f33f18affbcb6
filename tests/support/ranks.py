"""Run functions on the ranks of a process group (gloo or NCCL), with a limit on every wait.

The processes start once and serve many tests.
"""

from __future__ import annotations

import functools
import importlib
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

SIZE = 4
# global ranks of the groups, which differ from the group ranks
MEMBERS = {2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3), 8: tuple(range(8))}
LIMIT = 60.0  # seconds


class Groups(dict):
    """The groups of this rank: 2, 3 and 4 processes, and the same four with a timeout of 2 s."""


def members(size: int, processes: int) -> tuple[int, ...]:
    """Return the global ranks of the group of this size."""
    return MEMBERS[size] if max(MEMBERS[size]) < processes else tuple(range(size))


@functools.cache
def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """Return the group as a CPU mesh, the same object each time.

    torch 2.13 cannot compile for a mesh that equals another one used in eager code.
    """
    return DeviceMesh.from_group(group, "cpu")


def device() -> torch.device:
    """Return the device of this process's tensors."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def _serve(rank: int, processes: int, backend: str, store: str, limit: float, pipe) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=limit),
    )
    groups = Groups(
        {
            size: dist.new_group(list(members(size, processes)))
            for size in MEMBERS
            if size <= processes
        }
    )
    groups["impatient"] = dist.new_group(list(range(processes)), timeout=timedelta(seconds=2))
    groups["lower half"] = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    pipe.send(("ready", None))
    while (request := pipe.recv()) is not None:
        module, name, args = request
        try:
            out = getattr(importlib.import_module(module), name)(groups, *args)
            buffer = io.BytesIO()
            torch.save(out, buffer)
            pipe.send(("returned", buffer.getvalue()))
        except BaseException as error:
            pipe.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Raised(Exception):
    """An exception on a rank: the name of its type, its message and trace."""

    def __init__(self, kind: str, message: str, trace: str):
        super().__init__(trace)
        self.kind, self.message = kind, message


class Ranks:
    """The processes, for a test: started on first use, and again after one hangs.

    `limit` is the seconds that one request may take.
    """

    def __init__(self, size: int = SIZE, backend: str = "gloo", limit: float = LIMIT):
        self.size, self.backend, self.limit = size, backend, limit
        self.pipes: list = []
        self.processes: list = []

    def _start(self) -> None:
        # torch is imported once, by the fork server
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "kda_ops"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, self.backend, store, self.limit, there),
                daemon=True,
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self._answers(tuple(range(self.size)), 2 * self.limit)

    def _answers(self, ranks: tuple[int, ...], limit: float) -> dict[int, tuple]:
        """Return the next message of each of these ranks.

        If one does not arrive in time, stop the processes and report the others' exceptions.
        """
        waiting = {self.pipes[rank]: rank for rank in ranks}
        answers = {}
        deadline = time.monotonic() + limit
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                traces = "".join(
                    f"\nrank {rank}: {value[2]}"
                    for rank, (kind, value) in answers.items()
                    if kind == "raised"
                )
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} did not answer within {limit} s{traces}"
                )
            for pipe in ready:
                answers[waiting.pop(pipe)] = pipe.recv()
        return answers

    def ask(self, size: int, function, *args) -> list:
        """Run ``function(groups, *args)`` on each rank of the group of this size.

        Return the results by group rank; an exception becomes `Raised`.
        """
        if not self.processes:
            self._start()
        ranks = members(size, self.size)
        for rank in ranks:
            self.pipes[rank].send((function.__module__, function.__name__, args))
        answers = self._answers(ranks, self.limit)
        kinds = (answers[rank] for rank in ranks)
        return [
            torch.load(io.BytesIO(value), map_location="cpu")
            if kind == "returned"
            else Raised(*value)
            for kind, value in kinds
        ]

    def run(self, size: int, function, *args) -> list:
        """Call `ask`, and fail if a rank raised."""
        answers = self.ask(size, function, *args)
        for answer in answers:
            if isinstance(answer, Raised):
                raise answer
        return answers

    def stop(self) -> None:
        """Ask the processes to end, then terminate the rest."""
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        if self.processes:
            self._folder.cleanup()
        self.pipes, self.processes = [], []
