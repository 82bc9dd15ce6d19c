"""Tests of a session without Ray: stored jobs, lost pipeline actors, and what no node has."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from fake_actor import FakeNodes, FakePipelineActor
from ray.exceptions import ActorDiedError, RayActorError

from dpex import tuning
from dpex.carriers.ray import remote_pipelines, remote_run
from dpex.carriers.ray import session as session_module
from dpex.carriers.ray.ray_dataset import LaterStage, PipelineSpec
from dpex.carriers.ray.remote_run import RemoteRun
from dpex.carriers.ray.session import Session, StoredJob
from dpex.carriers.ray.tasks_or_actors import IN_ACTORS
from dpex.cluster import connect
from dpex.cluster.connect import Connection
from dpex.errors import ClusterError, DatasetTooLargeError, SerializationError
from dpex.protocol.binding import Binding
from dpex.transforms import Stage
from dpex.wire.pickling import Pickled
from dpex.wire.segments import readable_segments
from dpex.worker.loader_jobs import LoaderJobs

RUN = "first"
LOCAL = Connection("local", "10.0.0.5:6379", single_host=True, runtime_env=None)
CLUSTER = Connection("cluster", "10.0.0.5:6379", single_host=False, runtime_env=None)
ONE_HOST = replace(CLUSTER, single_host=True)
BROUGHT = replace(CLUSTER, runtime_env={"py_modules": ["dpex.zip"]})
CLIENT = replace(BROUGHT, kind="client")
TAPE: Any = {"resources": {"tape": 1}}
MIB, GIB = 1 << 20, 1 << 30


def node(
    number: str = "here",
    *,
    alive: bool = True,
    labels: dict[str, str] | None = None,
    **resources: float,
) -> dict[str, Any]:
    return {"NodeID": number, "Alive": alive, "Resources": resources, "Labels": labels or {}}


class Ref:
    """A reference to a stored job."""

    def __init__(self, content: bytes) -> None:
        self.content = content


class FakeRay:
    """The Ray of a test's sessions, and this process as they see it.

    Attributes:
        nodes: As ``ray.nodes()`` returns them. This process's node is ``here``.
        free: As ``ray.available_resources()`` returns them.
        starts_nodes: Whether an autoscaler starts nodes.
        actors: The pipeline actors. Each starts when the one before it is lost.
        environments: The runtime environment of each call for a pipeline actor.
        stored: Contents of the jobs in the object store, in order.
        kept: References to stored jobs that a session or a recorded call still has.
        health: What the sessions wait for answers with.
        changed: The user's modules whose code worker processes cannot import.
        released: Functions that finalizers have passed to the release thread.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = [node(CPU=8.0)]
        self.free: dict[str, float] = {"CPU": 8.0}
        self.starts_nodes = False
        self.actors: list[FakePipelineActor] = []
        self.environments: list[Any] = []
        self.stored: list[bytes] = []
        self.same_hosts: list[bool] = []
        # The pipelines of which something has waited until worker processes drop their copies.
        self.waited_for: list[str] = []
        self.kept: weakref.WeakSet[Ref] = weakref.WeakSet()
        self.health = FakeNodes()
        self.changed: list[str] = []
        self.released: list[Callable[[], object]] = []

        context = SimpleNamespace(get_node_id=lambda: "here")
        ray = SimpleNamespace(
            nodes=lambda: self.nodes,
            available_resources=lambda: self.free,
            get_runtime_context=lambda: context,
        )
        for name, value in {
            "ray": ray,
            "get_pipeline_actor": self.actor,
            "store_job": self.store,
            "Nodes": lambda: self.health,
            "cluster_size": self.size,
            "cpu_users": lambda: "3 x train",
            "starts_no_nodes": lambda: not self.starts_nodes,
            "free_cores": lambda: 6,
            "changed": lambda: self.changed,
            "release_later": self.released.append,
            "be_ready": lambda: None,
            "_load_ray_data": lambda: None,
        }.items():
            patch.setattr(session_module, name, value)
        for module in (remote_pipelines, remote_run):
            patch.setattr(module, "wait_for_release", lambda _, keys: self.waited_for.extend(keys))
        patch.setattr(connect, "cluster_size", self.size)
        patch.setattr("dpex.log._warned", set())

    def actor(self, runtime_env: Any) -> FakePipelineActor:
        self.environments.append(runtime_env)
        if not self.actors or self.actors[-1].lost:
            self.actors.append(FakePipelineActor(f"actor {len(self.actors)}"))
        return self.actors[-1]

    def store(self, pickled: Pickled, *, same_host: bool) -> Ref:
        self.same_hosts.append(same_host)
        ref = Ref(pickled.head)
        self.stored.append(ref.content)
        self.kept.add(ref)
        return ref

    def size(self) -> tuple[int, float, float]:
        alive = [each["Resources"] for each in self.nodes if each["Alive"]]
        cpus, gpus = (sum(has.get(name, 0) for has in alive) for name in ("CPU", "GPU"))
        return len(alive), cpus, gpus

    def session(self, connection: Connection = LOCAL, **given: Any) -> Session:
        options = {"num_workers": 2, "persistent": False, "worker_options": None}
        return Session(connection, **{**options, **given})


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


class Job:
    """A loader's job, or a later stage's, that records how it was pickled.

    Attributes:
        content: Its pickle.
        here_only: The argument of each call.
        by_value: Whether each call pickled this module by value.
        by_value_fails: Whether such a call fails.
    """

    def __init__(self, content: bytes = b"job", *, by_value_fails: bool = False) -> None:
        self.content = content
        self.here_only: list[bool] = []
        self.by_value: list[bool] = []
        self.by_value_fails = by_value_fails

    def __call__(self, here_only: bool) -> Pickled:
        self.here_only.append(here_only)
        self.by_value.append(__name__ in cloudpickle.list_registry_pickle_by_value())
        if self.by_value_fails and self.by_value[-1]:
            raise SerializationError("an open file")
        return Pickled(self.content)


def of_size(size_bytes: int) -> Any:
    """Return a function that pickles a job of some size, which takes no memory."""
    pickled = SimpleNamespace(digest=str(size_bytes), size_bytes=size_bytes, head=b"large")
    return lambda _: pickled


def store(session: Session, job: Any, later: Sequence[tuple[Stage, Any]] = ()) -> StoredJob:
    """Store functions that pickle a job, and the jobs of the later stages."""
    context = multiprocessing.get_context()
    return session.store(
        LoaderJobs(job, later, False, context), lambda pickle, here_only: pickle(here_only)
    )


def double(value: Any) -> Any:
    return 2 * value


def open_run(session: Session, job: StoredJob | None = None) -> RemoteRun:
    """Open a run of a job, or of the job that a session has stored last."""
    job = job or session._stored
    assert job is not None
    return session.open(RUN, job, binding=Binding.ALWAYS, pin_device=None)()


def calls(actor: FakePipelineActor) -> list[str]:
    return [method for method, *_ in actor.calls]


def opened(actor: FakePipelineActor) -> PipelineSpec:
    """Return the specification of the last pipeline that a session has opened."""
    specs: list[PipelineSpec] = [call[2] for call in actor.calls if call[0] == "open"]
    return specs[-1]


def contents(refs: Sequence[Any]) -> list[bytes]:
    return [ref.content for ref in refs]


def later_of(session: Session, ray: FakeRay, *stages: Stage) -> tuple[LaterStage, ...]:
    """Return the later stages of a pipeline, as its actor gets them."""
    store(session, Job(), [(stage, Job(b"stage")) for stage in stages])
    open_run(session)
    return opened(ray.actors[-1]).later


# --- stored jobs ----------------------------------------------------------------------------------


def test_a_job_is_stored_again_only_if_its_bytes_differ(ray: FakeRay) -> None:
    session = ray.session()
    one = store(session, Job(b"one"))
    assert one.key == Pickled(b"one").digest
    assert store(session, Job(b"one")) is one
    assert ray.stored == [b"one"]
    two = store(session, Job(b"two"))
    assert two.key == Pickled(b"two").digest
    assert ray.stored == [b"one", b"two"]
    for job, content in ((one, b"one"), (two, b"two")):
        open_run(session, job).end()
        spec = opened(ray.actors[0])
        assert (contents(spec.job), spec.job_key) == ([content], job.key)
    ray.actors[0].calls.clear()
    del one, two, job, spec
    assert contents(list(ray.kept)) == [b"two"], "the first job is released"


def test_later_stages_are_stored_again_only_if_their_bytes_differ(ray: FakeRay) -> None:
    session = ray.session()
    first, second = Stage(double), Stage(double, num_cpus=2)

    def stored(*jobs: bytes) -> tuple[LaterStage, ...]:
        store(session, Job(), [*zip((first, second), map(Job, jobs), strict=False)])
        open_run(session)
        return opened(ray.actors[0]).later

    later = stored(b"a", b"b")
    assert [contents(stage.job) for stage in later] == [[b"a"], [b"b"]]
    assert [stage.job_key for stage in later] == [Pickled(b"a").digest, Pickled(b"b").digest]
    assert [stage.options["num_cpus"] for stage in later] == [1, 2]
    assert stored(b"a", b"b") == later
    assert ray.stored == [b"job", b"a", b"b"]
    assert [contents(stage.job) for stage in stored(b"a", b"c")] == [[b"a"], [b"c"]]
    assert ray.stored.count(b"job") == 1, "the first stage is the same"
    assert stored() == ()


def test_a_close_releases_the_jobs(ray: FakeRay) -> None:
    session = ray.session()
    jobs = [store(session, Job(), [(Stage(double), Job(stage))]) for stage in (b"a", b"b")]
    assert len(ray.kept) == 3
    session.close()
    assert len(jobs) == 2, "iterators may still have them"
    assert not ray.kept


@pytest.mark.parametrize(
    ("by_value", "connection", "given"),
    [
        (False, LOCAL, {}),
        (False, ONE_HOST, {}),
        (True, CLUSTER, {}),
        (False, LOCAL, {"persistent": True}),
        (True, LOCAL, {"changed": ["mine"]}),
    ],
)
def test_modules_that_worker_processes_may_lack_are_pickled_by_value(
    by_value: bool,
    connection: Connection,
    given: dict[str, Any],
    ray: FakeRay,
) -> None:
    given = dict(given)
    ray.changed = given.pop("changed", [])
    jobs = Job(), Job(b"stage")
    store(ray.session(connection, **given), jobs[0], [(Stage(double), jobs[1])])
    assert [job.by_value for job in jobs] == [[by_value]] * 2
    assert [job.here_only for job in jobs] == [[connection.single_host]] * 2
    assert set(ray.same_hosts) == {connection.single_host}


@pytest.mark.parametrize(
    ("connection", "changed", "notes"),
    [(CLUSTER, [], []), (LOCAL, ["mine", "other"], ["have changed since their import: mine, oth"])],
)
def test_a_module_that_has_no_value_is_an_error_that_names_changed_ones(
    connection: Connection, changed: list[str], notes: list[str], ray: FakeRay
) -> None:
    ray.changed = changed
    session = ray.session(connection, persistent=True)
    with pytest.raises(SerializationError, match="an open file") as raised:
        store(session, Job(by_value_fails=True))
    found = getattr(raised.value, "__notes__", [])
    assert len(found) == len(notes)
    assert all(part in note for part, note in zip(notes, found, strict=True))
    assert ray.stored == []


@pytest.mark.parametrize(
    ("connection", "advice"),
    [
        (LOCAL, "set DPEX_OBJECT_STORE_MEMORY to more bytes"),
        (CLUSTER, "start Ray's nodes with a larger --object-store-memory"),
    ],
)
def test_a_job_larger_than_the_object_store_is_an_error(
    connection: Connection, advice: str, ray: FakeRay
) -> None:
    ray.nodes = [
        node("other", CPU=8.0, object_store_memory=9.0 * GIB),
        node(CPU=8.0, object_store_memory=1.5 * GIB),
    ]
    session = ray.session(connection)
    with pytest.raises(DatasetTooLargeError) as info:
        store(session, of_size(1_536 * MIB + 1))
    assert "the pickled dataset has 1.5 GiB, but Ray's object store on this node holds 1.5 GiB" in (
        str(info.value)
    )
    assert "dpex.datasets.on_node, or " + advice in str(info.value)
    assert ray.stored == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store(session, of_size(1_536 * MIB))
    assert ray.stored == [b"large"], "the session still works"


def test_sizes_below_a_gibibyte_are_in_mebibytes(ray: FakeRay) -> None:
    ray.nodes = [node(CPU=8.0, object_store_memory=100.0 * MIB)]
    with pytest.raises(DatasetTooLargeError, match=r"has 1,023\.0 MiB, .* holds 100\.0 MiB"):
        store(ray.session(), of_size(1_023 * MIB))


def sizes_told(session: Session, size_bytes: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store(session, of_size(size_bytes))
    return [str(warning.message) for warning in caught]


def test_one_warning_per_process_tells_of_a_large_job(ray: FakeRay) -> None:
    large = tuning.LARGE_DATASET_BYTES
    assert sizes_told(ray.session(CLUSTER), large) == []
    for connection in (LOCAL, ONE_HOST):
        assert sizes_told(ray.session(connection), 2 * large) == [], "it does not travel"
    session = ray.session(CLUSTER)
    [told] = sizes_told(session, 12 * large)
    assert "has 1,200 MB, which travel" in told
    assert "dpex.datasets.on_node(YourDataset, ...)" in told
    assert sizes_told(session, 13 * large) == sizes_told(ray.session(CLUSTER), 12 * large) == []


# --- what no node has -----------------------------------------------------------------------------


def test_a_local_ray_refuses_what_it_does_not_have(ray: FakeRay) -> None:
    with pytest.raises(ClusterError, match=r"asks for \{'tape': 1, 'CPU': 1\}, .* Ask for less"):
        ray.session(worker_options=TAPE)
    assert ray.actors == []


def test_a_cluster_gets_time_for_a_node_that_meets_the_options(
    ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    session = ray.session(CLUSTER, worker_options=TAPE)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("worker_options asks for {'tape': 1, 'CPU': 1}, but no")
    assert record.getMessage().endswith("The loader waits until such a node joins")

    wait_s = tuning.NODE_JOINS_S
    session.check_still_possible(wait_s - 1)
    ray.starts_nodes = True
    session.check_still_possible(wait_s)
    ray.starts_nodes = False
    with pytest.raises(ClusterError, match=f"joined for {wait_s:.0f} s, and .* no autoscaler"):
        session.check_still_possible(wait_s)
    ray.nodes = [node(memory=8.0)]
    session.check_still_possible(wait_s)  # nodes with CPUs have yet to join
    ray.nodes.append(node("new", CPU=4.0, tape=1.0))
    session.check_still_possible(wait_s)


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        ([node(CPU=8.0, tape=1.0)], TAPE),
        ([node(CPU=0.5)], None),
        # The nodes with CPUs have not joined yet.
        ([node(memory=8.0)], TAPE),
    ],
)
def test_options_that_a_node_may_meet_are_no_problem(
    nodes: list[Any], options: Any, ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    ray.nodes = nodes
    for connection in (LOCAL, CLUSTER):
        ray.session(connection, worker_options=options)
    assert caplog.records == []


@pytest.mark.parametrize(
    "stage", [Stage(double, **TAPE), Stage(double, num_gpus=1), Stage(double, num_cpus=9)]
)
def test_a_later_stage_that_no_node_can_run_is_an_error(stage: Stage, ray: FakeRay) -> None:
    ray.nodes = [
        node(CPU=8.0),
        node("other", CPU=4.0, GPU=0.5),
        node("dead", alive=False, CPU=16.0, GPU=2.0, tape=2.0),
    ]
    session = ray.session(CLUSTER)
    with pytest.raises(ClusterError, match=r"^stage 2 \(double\) asks for .*'CPU': 8\.0"):
        store(session, Job(), [(Stage(double), Job(b"a")), (stage, Job(b"b"))])
    ray.nodes[-1]["Alive"] = True
    store(session, Job(), [(Stage(double), Job(b"a")), (stage, Job(b"b"))])


def test_a_stage_s_resources_must_be_on_one_node(ray: FakeRay) -> None:
    ray.nodes = [node(CPU=8.0), node("other", CPU=2.0, GPU=1.0)]
    session = ray.session(CLUSTER)
    stage = Stage(double, num_cpus=4, num_gpus=1)
    with pytest.raises(ClusterError, match=r"on any node: \{'CPU': 8\.0, 'GPU': 1\.0\}"):
        later_of(session, ray, stage)


def test_a_stage_is_no_problem_before_nodes_with_cpus_have_joined(ray: FakeRay) -> None:
    ray.nodes = [node(memory=8.0)]
    [stage] = later_of(ray.session(CLUSTER), ray, Stage(double, **TAPE))
    assert stage.options == {"num_cpus": 1, "resources": {"tape": 1}}


# --- options of worker processes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpus", "max_workers", "free", "most"),
    [(1, None, 4.0, 4), (1, 2, 4.0, 2), (1, None, 0.0, 1), (0.5, None, 1.0, 2), (1, None, 99.0, 8)],
)
def test_a_stage_gets_as_many_workers_as_gpus_are_free(
    num_gpus: float, max_workers: int | None, free: float, most: int, ray: FakeRay
) -> None:
    ray.nodes = [node(CPU=8.0, GPU=4.0)]
    ray.free["GPU"] = free
    stage = Stage(double, num_gpus=num_gpus, max_workers=max_workers)
    [later] = later_of(ray.session(num_workers=8), ray, stage)
    assert later.most_workers == most
    assert later.keeps_processes
    assert later.options == {"num_cpus": 1, "num_gpus": num_gpus}


def test_a_stage_runs_only_on_nodes_with_its_labels(ray: FakeRay) -> None:
    ray.nodes = [node(CPU=8.0, labels={"disk": "slow"})]
    session = ray.session(CLUSTER)
    stage = Stage(double, label_selector={"disk": "fast"})
    with pytest.raises(
        ClusterError, match=r"for label_selector=\{'disk': 'fast'\}, but nodes have"
    ):
        later_of(session, ray, stage)
    ray.nodes.append(node("other", CPU=1.0, labels={"disk": "fast"}))
    [later] = later_of(session, ray, stage)
    assert later.options == {"num_cpus": 1, "label_selector": {"disk": "fast"}}


@pytest.mark.parametrize(("max_workers", "most"), [(None, 8), (9, 9)])
def test_a_stage_without_gpus_gets_as_many_workers_as_the_first(
    max_workers: int | None, most: int, ray: FakeRay
) -> None:
    [later] = later_of(ray.session(num_workers=8), ray, Stage(double, max_workers=max_workers))
    assert (later.most_workers, later.capped) == (most, max_workers is not None)
    assert not later.keeps_processes
    assert later.options == {"num_cpus": 1}


def test_nodes_that_lack_dpex_get_it_besides_the_user_s_own_modules(ray: FakeRay) -> None:
    given = {"num_cpus": 2, "runtime_env": {"py_modules": ["own.zip"], "env_vars": {"OWN": "1"}}}
    session = ray.session(BROUGHT, worker_options=given)
    [later] = later_of(session, ray, Stage(double))
    both = {"py_modules": ["dpex.zip", "own.zip"], "env_vars": {"OWN": "1"}}
    assert opened(ray.actors[0]).options == {"num_cpus": 2, "runtime_env": both}
    assert later.options["runtime_env"] == both
    assert ray.environments == [{"py_modules": ["dpex.zip"]}]
    assert given["runtime_env"] == {"py_modules": ["own.zip"], "env_vars": {"OWN": "1"}}
    session = ray.session(BROUGHT)
    assert later_of(session, ray, Stage(double))[0].options["runtime_env"] == BROUGHT.runtime_env


# --- iterations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("connection", [LOCAL, CLUSTER, CLIENT])
@pytest.mark.parametrize("in_actors", [False, True])
def test_an_iteration_opens_a_pipeline(
    connection: Connection, in_actors: bool, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IN_ACTORS, str(int(in_actors)))
    session = ray.session(connection, persistent=True, worker_options={"num_cpus": 2})
    store(session, Job())
    ray.actors[0].calls.clear()
    run = open_run(session)
    [(method, key, spec, run_key)] = ray.actors[0].calls
    assert (method, run_key) == ("open", RUN)
    assert spec == PipelineSpec(
        spec.job,
        Pickled(b"job").digest,
        "actor 0",
        key,
        claims_cpus=connection is not LOCAL,
        num_workers=2,
        binding=Binding.ALWAYS,
        persistent=True,
        options=spec.options,
        reader="" if connection is CLIENT else readable_segments(),
        in_actors=in_actors,
    )
    assert spec.options["num_cpus"] == 2
    assert run._pipeline_key == key
    assert run._run == RUN
    assert run._through_client == (connection is CLIENT)
    assert run._pin_device is None


def idle_pipeline(session: Session) -> None:
    """Open a pipeline, and end its first iteration."""
    store(session, Job())
    open_run(session).end()


def test_an_iteration_starts_without_a_wait_for_the_answer(ray: FakeRay) -> None:
    session = ray.session(CLUSTER)
    idle_pipeline(session)
    job = store(session, Job())
    run_of = session.open(RUN, job, binding=Binding.ALWAYS, pin_device=None)
    assert calls(ray.actors[0]) == ["open", "begin"]
    assert ray.health.waits == 0
    run = run_of()
    assert ray.health.waits == 1
    assert calls(ray.actors[0]) == ["open", "begin"], "the pipeline serves this run too"
    assert run._pipeline_key == ray.actors[0].calls[0][1]


@pytest.mark.parametrize("wait", [False, True])
def test_a_warm_pipeline_serves_the_next_iteration(
    wait: bool, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])
    timeouts: list[float] = []

    def answered(refs: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        timeouts.append(timeout)
        return (refs, []) if next(answers) else ([], refs)

    monkeypatch.setattr(remote_run, "ray", SimpleNamespace(wait=answered))
    session = ray.session()
    job = store(session, Job())
    session.warm_up(job, binding=Binding.ALWAYS, wait=wait)
    assert calls(ray.actors[0]) == ["open", "start_task"]
    assert timeouts == [tuning.LOOK_S if wait else 0] * (3 if wait else 1)
    run = open_run(session, job)
    assert calls(ray.actors[0]) == ["open", "start_task", "begin"]
    assert run._pipeline_key == ray.actors[0].calls[0][1]


def test_a_pipeline_that_does_not_begin_is_replaced(ray: FakeRay) -> None:
    session = ray.session(CLUSTER)
    idle_pipeline(session)
    ray.actors[0].answers["begin"] = False, False
    run = open_run(session)
    assert calls(ray.actors[0]) == ["open", "begin", "close", "open"]
    assert run._pipeline_key == ray.actors[0].calls[-1][1] != ray.actors[0].calls[0][1]
    assert len(ray.actors) == 1


@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_workers_that_are_lost_with_the_actor_are_reported(
    persistent: bool, ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    session = ray.session(CLUSTER, persistent=persistent)
    ray.actors[0].failure = ActorDiedError
    idle_pipeline(session)
    assert len(ray.actors) == 2
    assert "persistent workers" not in caplog.text, "none have started"
    ray.actors[-1].lost = True
    open_run(session)
    assert ("State of persistent workers starts again" in caplog.text) == persistent


def lose_before(actor: FakePipelineActor) -> None:
    actor.lost = True


def lose_at_begin(actor: FakePipelineActor) -> None:
    actor.failure = RayActorError


def lose_after_begin(actor: FakePipelineActor) -> None:
    actor.answers["begin"] = ActorDiedError


def lose_while_a_pipeline_is_replaced(actor: FakePipelineActor) -> None:
    actor.answers["begin"] = False, False

    def fail_at_open(method: str, *arguments: Any) -> Any:
        if method == "open":
            raise ActorDiedError
        return FakePipelineActor.call(actor, method, *arguments)

    actor.call = fail_at_open  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "lose", [lose_before, lose_at_begin, lose_after_begin, lose_while_a_pipeline_is_replaced]
)
def test_a_lost_actor_is_replaced(lose: Callable[[FakePipelineActor], None], ray: FakeRay) -> None:
    session = ray.session(LOCAL)
    stage = Stage(double), Job(b"stage")
    store(session, Job(), [stage])
    open_run(session).end()
    lose(ray.actors[0])

    run = open_run(session)
    old, new = ray.actors
    assert old.lost
    assert calls(new) == ["open"]
    spec = opened(new)
    assert spec.actor_name == "actor 1"
    assert contents(spec.job) == [b"job"]
    assert [contents(stage.job) for stage in spec.later] == [[b"stage"]]
    assert run._pipeline_key == new.calls[-1][1]
    used: Any = run._actor
    assert used is new

    store(session, Job(), [stage])
    run.end()
    open_run(session)
    assert calls(new) == ["open", "begin"], "the new pipeline serves the next run"
    assert ray.stored == [b"job", b"stage"]


# --- texts and numbers ----------------------------------------------------------------------------


def test_free_cores_are_this_process_s_or_the_cluster_s(ray: FakeRay) -> None:
    assert ray.session().first_tasks() == 6
    for free, num_cpus, tasks in ((8.0, None, 8), (7.0, 2, 3), (0.5, 1, 1), (3.0, 0, 3)):
        options = None if num_cpus is None else {"num_cpus": num_cpus}
        session = ray.session(CLUSTER, worker_options=options)
        ray.free = {"CPU": free}
        assert session.first_tasks() == tasks
    ray.free = {}
    assert ray.session(CLUSTER).first_tasks() == 1


def test_the_text_of_a_wait_on_a_local_ray(ray: FakeRay) -> None:
    ray.free = {"CPU": 0.0}
    text = ray.session().waiting_text(tasks=0, in_flight=3)
    assert text.startswith("Local Ray on ")
    assert ", 0 tasks running, 3 batches in flight. The worker processes are starting" in text
    assert "free" not in text


def test_the_text_of_a_wait_on_a_cluster(ray: FakeRay) -> None:
    ray.free = {"CPU": 0.5}
    session = ray.session(CLUSTER)
    text = session.waiting_text(tasks=0, in_flight=1)
    size = "Ray at 10.0.0.5:6379: 1 node, 8 CPUs, of which 0.5 free, 0 tasks running, 1 batch in"
    assert text.startswith(size)
    assert "others use the CPUs (3 x train)" in text
    assert "GPU" not in text
    assert "does not answer" in session.waiting_text(tasks=None, in_flight=1)


def test_the_text_of_a_wait_says_what_no_node_has(ray: FakeRay) -> None:
    session = ray.session(CLUSTER, worker_options=TAPE)
    text = session.waiting_text(tasks=0, in_flight=1)
    assert ". worker_options asks for {'tape': 1, 'CPU': 1}, but no node has all of it" in text


def test_the_text_of_a_wait_says_how_many_gpus_are_free(ray: FakeRay) -> None:
    ray.nodes = [node(CPU=8.0, GPU=2.0)]
    ray.free = {"CPU": 8.0, "GPU": 1.0}
    session = ray.session()
    store(session, Job(), [(Stage(double), Job(b"a"))])
    assert "GPU" not in session.waiting_text(tasks=1, in_flight=1)
    store(session, Job(), [(Stage(double), Job(b"a")), (Stage(double, num_gpus=1), Job(b"b"))])
    assert ". 1 GPUs are free. A loader" in session.waiting_text(tasks=1, in_flight=1)


def test_the_text_of_a_wait_survives_a_ray_that_does_not_answer(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ray.session(CLUSTER)

    def fail() -> Any:
        raise RuntimeError("no head")

    monkeypatch.setattr(session_module, "cluster_size", fail)
    text = session.waiting_text(tasks=None, in_flight=2)
    assert text == "Ray, 2 batches in flight. Ray does not report its CPUs: no head"


def test_the_text_of_a_wait_does_not_wait_for_a_head_that_is_gone(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ray.session(CLUSTER, worker_options=TAPE)
    answers = threading.Event()
    monkeypatch.setattr(session_module, "cluster_size", answers.wait)
    monkeypatch.setattr(tuning, "HEAD_ANSWER_S", 0.05)
    try:
        text = session.waiting_text(tasks=None, in_flight=2)
        assert text.endswith("Ray does not report its CPUs: no answer within 0.05 s")
        session.check_still_possible(tuning.NODE_JOINS_S)
    finally:
        answers.set()


def test_the_death_of_this_process_s_node_is_no_error_of_a_log_line(ray: FakeRay) -> None:
    session = ray.session()
    ray.health.error = ClusterError("the node has died")
    session.name_dead_nodes()


# --- the end --------------------------------------------------------------------------------------


def test_a_close_closes_the_pipelines_once(ray: FakeRay) -> None:
    session = ray.session(CLUSTER)
    store(session, Job())
    runs = [open_run(session) for _ in range(2)]
    assert session.alive
    for _ in range(2):
        session.close()
    assert calls(ray.actors[0]) == ["open", "open", "close", "close"]
    assert len(set(ray.waited_for)) == 2, "for each pipeline, until no process holds a copy"
    assert not session.alive
    del session, runs
    assert ray.released == []


def test_an_interrupted_close_can_be_repeated(ray: FakeRay) -> None:
    session = ray.session(CLUSTER)
    store(session, Job())
    runs = [open_run(session) for _ in range(2)]
    ray.actors[0].failure = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        session.close()
    ray.actors[0].failure = None
    session.close()
    assert calls(ray.actors[0]) == ["open", "open", "close", "close"]
    assert not session.alive
    del runs


def test_a_session_ends_with_its_ray(ray: FakeRay) -> None:
    session = ray.session(CLUSTER)
    idle_pipeline(session)
    ray.actors[0].lost = True
    assert session.alive, "a new actor will replace the old one"
    ray.actors[0].connected = False
    assert not session.alive
    session.close()
    assert calls(ray.actors[0]) == ["open"]


def test_a_session_that_is_dropped_closes_its_pipelines(ray: FakeRay) -> None:
    session = ray.session(CLUSTER)
    idle_pipeline(session)
    del session
    [release] = ray.released
    release()
    assert calls(ray.actors[0]) == ["open", "close"]
