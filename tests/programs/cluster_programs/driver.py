"""A program that runs the requests of a test, one JSON line each."""

import faulthandler
import json
import logging
import os
import sys
import threading
import time

from output import take_stdout

from dpex.cluster.connect import choose, connect, cpu_users
from dpex.cluster.local import launch

replies = take_stdout()
logged: list[str] = []
held: list[object] = []


class Recorder(logging.Handler):
    def emit(self, record):
        logged.append(f"{record.levelname} {record.getMessage()}")


def do_connect(head_address):
    began = time.monotonic()
    connection = connect(head_address)
    import ray

    return {
        "kind": connection.kind,
        "address": connection.address,
        "single_host": connection.single_host,
        "runtime_env": connection.runtime_env,
        "node": ray.get_runtime_context().get_node_id(),
        "seconds": time.monotonic() - began,
    }


def do_choose(head_address):
    return choose(head_address)


def do_connect_in_thread(head_address):
    """Connect in a thread, and wait for the thread to end."""
    replies = []
    thread = threading.Thread(target=lambda: replies.append(do_connect(head_address)))
    thread.start()
    thread.join()
    return replies[0]


def do_init(**options):
    import ray

    ray.init(logging_level=logging.ERROR, **options)
    return ray.get_runtime_context().gcs_address


def do_start_local():
    """Start a local Ray, as ``connect`` does if this process was not connected a moment ago."""
    launch.start()


def do_is_connected():
    import ray

    return ray.is_initialized()


def do_shutdown():
    import ray

    ray.shutdown()


def do_task(variable="RANK", runtime_env=None, node=None, module=None):
    """Run a task; return a variable of its environment, and the file of a module there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look():
        import importlib
        import os

        path = importlib.import_module(module).__file__ if module else None
        return os.environ.get(variable), path

    options = {"num_cpus": 0}
    if runtime_env is not None:
        options["runtime_env"] = runtime_env
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(ray.remote(look).options(**options).remote(), timeout=60)


def do_hog(num_cpus):
    """Occupy CPUs with a task, and one more CPU with a placement group."""
    import ray
    from ray.util.placement_group import placement_group

    @ray.remote(num_cpus=num_cpus)
    def hog():
        time.sleep(1000)

    held.append(hog.remote())
    group = placement_group([{"CPU": 1}], name="reserved")
    ray.get(group.ready(), timeout=60)
    held.append(group)


def do_busy():
    return cpu_users()


def do_cluster():
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    store = [node["Resources"]["object_store_memory"] for node in nodes]
    return {
        "cpus": ray.cluster_resources().get("CPU", 0),
        "object_store_bytes": sum(store),
        "nodes": [node["NodeID"] for node in nodes],
    }


def do_logged():
    return logged


def do_fork_sleeper():
    """Fork a child that sleeps until it is killed, as a worker process of torch may."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir("/")
        while True:
            time.sleep(1000)
    return pid


def do_connect_in_fork(head_address):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcome = connect(head_address).kind
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(write_end, outcome.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(read_end, 10_000).decode()


def do_fail():
    raise SystemExit("told to fail")


def main():
    faulthandler.enable()
    logging.getLogger("dpex").addHandler(Recorder())
    logging.getLogger("dpex").setLevel(logging.DEBUG)
    for line in sys.stdin:
        request = json.loads(line)
        call = globals()["do_" + request.pop("do")]
        try:
            reply = {"result": call(**request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
