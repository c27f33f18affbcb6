"""Processes of one group, of gloo or NCCL, that run functions side by side: started once, asked
many times, never waited for without a limit.
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
# global ranks of the groups; a group rank need not be the global one
MEMBERS = {2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3), 8: tuple(range(8))}
LIMIT = 60.0  # seconds that one request may take


class Groups(dict):
    """The groups that a function may name, on this rank: 2, 3 and 4 processes, and the same four
    with a timeout of two seconds.
    """


def members(size: int, processes: int) -> tuple[int, ...]:
    """The global ranks of the group of that size, of so many processes."""
    return MEMBERS[size] if max(MEMBERS[size]) < processes else tuple(range(size))


@functools.cache
def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """The group as a mesh of the CPU; always the same one, as torch 2.13 cannot compile for a mesh
    that equals one it has run on without compiling.
    """
    return DeviceMesh.from_group(group, "cpu")


def device() -> torch.device:
    """Where the tensors of this process live."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def _serve(rank: int, processes: int, backend: str, store: str, pipe) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=LIMIT),
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
    """What a rank raised: the name of the type, the message and the trace."""

    def __init__(self, kind: str, message: str, trace: str):
        super().__init__(trace)
        self.kind, self.message = kind, message


class Ranks:
    """The processes, as seen by the test; started when they are first asked, and anew after one got
    stuck.
    """

    def __init__(self, size: int = SIZE, backend: str = "gloo"):
        self.size, self.backend = size, backend
        self.pipes: list = []
        self.processes: list = []

    def _start(self) -> None:
        # torch is imported once, not by each process
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "kda_ops"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self.backend, store, there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self._answers(tuple(range(self.size)), 2 * LIMIT)

    def _answers(self, ranks: tuple[int, ...], limit: float) -> dict[int, tuple]:
        """The next message of each of these ranks. If one does not come in time, the processes end,
        and what the others raised is told.
        """
        waiting, answers, deadline = (
            {self.pipes[rank]: rank for rank in ranks},
            {},
            time.monotonic() + limit,
        )
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
        """What ``function(groups, *args)`` returned on each rank of the group of that size, or the
        `Raised`, by group rank.
        """
        if not self.processes:
            self._start()
        ranks = members(size, self.size)
        for rank in ranks:
            self.pipes[rank].send((function.__module__, function.__name__, args))
        answers = self._answers(ranks, LIMIT)
        kinds = (answers[rank] for rank in ranks)
        return [
            torch.load(io.BytesIO(value), map_location="cpu")
            if kind == "returned"
            else Raised(*value)
            for kind, value in kinds
        ]

    def run(self, size: int, function, *args) -> list:
        """`ask`, where no rank may raise."""
        answers = self.ask(size, function, *args)
        for answer in answers:
            if isinstance(answer, Raised):
                raise answer
        return answers

    def stop(self) -> None:
        """End the processes, politely where they still listen."""
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
