"""The cluster: it starts tasks on nodes as Ray does, and restarts those whose process has died."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpex import tuning
from simulation.attempts import Attempt
from simulation.machines import Node, WorkerProcess

if TYPE_CHECKING:
    from simulation.pipelines import Pipeline
    from simulation.schedule import World

__all__ = ["Cluster"]

TASK_START_S = 0.01
PROCESS_START_S = 0.5
# How long Ray takes to notice the end of a process.
NOTICE_S = 0.5
CLOSED = 1 << 30


class Cluster:
    """Nodes, and the tasks on them.

    Attributes:
        nodes: The nodes that run.
        attempts: All attempts that have not ended, replaced ones included.
        others: Number of CPUs that another job has.
        died_at: When a node last died.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        plan = world.plan
        self.nodes = [Node(number) for number in range(plan.nodes)]
        self._node_numbers = plan.nodes
        self._limited = plan.claims_cpus or plan.holds_resources
        self._frees = self._limited and not plan.holds_resources
        self._cpus = plan.cpus
        self._used = 0
        self._holding: set[Attempt] = set()
        self._pending: list[tuple[Pipeline, str]] = []
        self._processes: dict[str, WorkerProcess] = {}
        self._served: dict[int, list[WorkerProcess]] = {}
        self._killed: set[str] = set()
        self._begun: set[str] = set()
        self._names = 0
        self.attempts: dict[str, Attempt] = {}
        self.others = 0
        self.died_at = -1.0

    # --- starting tasks ---------------------------------------------------------------------------

    def submit(self, pipeline: Pipeline, task: str) -> None:
        """Start a task as soon as there is a CPU for it."""
        self._pending.append((pipeline, task))
        self.start_tasks()

    def start_tasks(self) -> None:
        """Start the tasks that have a CPU."""
        while self._pending and (not self._limited or self._used + self.others < self._cpus):
            pipeline, task = self._pending.pop(0)
            if pipeline.closed:
                continue
            self._used += 1
            draw = self._world.draw
            node = self.nodes[int(draw() * len(self.nodes))]
            idle = any(process.attempt is None for process in node.processes)
            delay_s = 2 * draw() * (TASK_START_S if idle else PROCESS_START_S)
            self._world.clock.after(delay_s, self._start, pipeline, task, node)

    def _start(self, pipeline: Pipeline, task: str, node: Node) -> None:
        if pipeline.closed or not node.alive:
            self._used -= 1
            if not pipeline.closed:
                self._pending.append((pipeline, task))
            self.start_tasks()
            return
        process = next((p for p in node.processes if p.attempt is None), None)
        self._names += 1
        if process is None:
            process = WorkerProcess(f"process {self._names}", node)
            node.processes.append(process)
        follows = task in self._begun
        self._begun.add(task)
        attempt = Attempt(self._world, pipeline, task, self._names, process, follows=follows)
        identity = attempt.id
        self._processes[identity] = process
        served = self._served.setdefault(pipeline.number, [])
        if process not in served:
            served.append(process)
        self._holding.add(attempt)
        self.attempts[identity] = pipeline.attempts[task] = attempt
        self._world.log("starts", identity, process.name, node.number)
        attempt.start()

    def tasks_wait(self) -> bool:
        """Return whether any task waits to start."""
        return bool(self._pending)

    def note_waiting(self, attempt: Attempt) -> None:
        """Note that an attempt waits for an answer, and so releases its CPU."""
        if self._frees:
            self._release(attempt)

    def note_resumes(self, attempt: Attempt) -> None:
        """Note that an attempt takes its CPU back, even if none is free."""
        if self._frees and attempt not in self._holding:
            self._holding.add(attempt)
            self._used += 1

    def note_end(self, attempt: Attempt) -> None:
        """Note that an attempt has ended, with its process or before it."""
        self.attempts.pop(attempt.id, None)
        pipeline = attempt.pipeline
        if pipeline.attempts.get(attempt.name) is attempt:
            del pipeline.attempts[attempt.name]
        self._world.log("ends", attempt.id)
        self._release(attempt)
        self._world.note_idle(pipeline)

    def _release(self, attempt: Attempt) -> None:
        if attempt in self._holding:
            self._holding.discard(attempt)
            self._used -= 1
            if self._pending:
                self.start_tasks()

    # --- ends -------------------------------------------------------------------------------------

    def process_of(self, attempt: str) -> WorkerProcess:
        """Return the process of an attempt."""
        return self._processes[attempt]

    def processes_that_served(self, pipeline: Pipeline) -> list[WorkerProcess]:
        """Return the processes that have had a task of a pipeline and still run."""
        return [p for p in self._served.get(pipeline.number, ()) if p.alive]

    def die(self, process: WorkerProcess, *, loses: bool = False) -> None:
        """End a process; Ray restarts its task.

        Args:
            process: The process.
            loses: Whether messages that it has sent may be lost with it.
        """
        if not process.alive:
            return
        attempt = process.attempt
        process.loses = loses
        self._world.log("dies", process.name, attempt and attempt.id)
        if attempt is not None:
            attempt.die()
            if not attempt.replaced:
                self._world.clock.after(self._world.draw() * NOTICE_S, self._restart, attempt)
            self.note_end(attempt)
        process.die()

    def replace(self, attempt: Attempt) -> None:
        """Restart the task of an attempt that Ray takes for dead, and that continues."""
        attempt.replaced = attempt.process.replaced = True
        self._world.log("replaces", attempt.id)
        self._world.states.lose(attempt)
        self._restart(attempt)

    def _restart(self, attempt: Attempt) -> None:
        attempt.restarted = attempt.over
        if not attempt.pipeline.closed:
            self.submit(attempt.pipeline, attempt.name)

    def kill_later(self, process: WorkerProcess) -> None:
        """Kill a process that a new one replaces, if it does not end by itself."""
        if process.name not in self._killed:
            self._killed.add(process.name)
            self._world.clock.after(tuning.END_S, self._kill_replaced, process)

    def _kill_replaced(self, process: WorkerProcess) -> None:
        attempt = process.attempt
        healthy = not process.replaced and (attempt is None or not attempt.pipeline.closed)
        if process.alive and healthy:
            self._world.fail(f"healthy {process.name} is killed in place of a replaced one")
        self.die(process)

    def lose_node(self, node: Node) -> None:
        """End a node with its processes and blocks; another one replaces it."""
        self._world.log("loses node", node.number)
        node.alive = False
        self.died_at = self._world.clock.now
        self.nodes.remove(node)
        if not self.nodes:
            self.nodes.append(Node(self._node_numbers))
            self._node_numbers += 1
        for process in list(node.processes):
            self.die(process, loses=True)
        for block in list(node.stored):
            self._world.lose_block(block)

    def end_tasks(self, pipeline: Pipeline) -> None:
        """Notify the processes of a closed pipeline, and kill a process whose task does not end."""
        for process in self.processes_that_served(pipeline):
            self._world.network.send(process.link, self._note_closed, process, pipeline)
        for attempt in list(self.attempts.values()):
            if attempt.pipeline is pipeline:
                self._world.clock.after(tuning.END_S, self._kill, attempt)

    def _note_closed(self, process: WorkerProcess, pipeline: Pipeline) -> None:
        process.ended[pipeline.number] = CLOSED
        process.drop_copies(pipeline.number)

    def _kill(self, attempt: Attempt) -> None:
        if not attempt.over:
            self.die(attempt.process)
