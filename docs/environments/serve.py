"""Steps environments on all cores of its host: python -m hetero --serve serve.py train.py."""

import hmac
import multiprocessing.connection
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import gymnasium
import numpy as np

ENVIRONMENT = "CartPole-v1"  # or "module:Name-v0", of a module that registers it
PER_CORE = 8  # environments, which a process steps one after the other
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 1000)]
pipes: list[multiprocessing.connection.Connection] = []  # to the processes


def play(pipe: multiprocessing.connection.Connection, seed: int) -> None:
    """Tell of environments, after a step if there are actions, in a process of their own."""
    envs = gymnasium.make_vec(ENVIRONMENT, PER_CORE, "sync", {"autoreset_mode": "SameStep"})
    space, (observation, _) = envs.action_space, envs.reset(seed=seed)
    reward, total, done = np.zeros((3, PER_CORE))
    with suppress(EOFError):  # the server has ended
        while True:
            if actions := pipe.recv_bytes():
                actions = np.frombuffer(actions, space.dtype).reshape(space.shape)
                observation, reward, ended, cut_off, _ = envs.step(actions)
                total, done = total * (1 - done) + reward, 1.0 * (ended | cut_off)
            rows = np.column_stack([reward, total, done, observation.reshape(PER_CORE, -1)])
            pipe.send_bytes(rows.astype(np.float32).tobytes())


def step(actions: bytes, context: grpc.ServicerContext) -> bytes:
    """Step all environments, unless there are no actions; return a row of float32 for each."""
    token = dict(context.invocation_metadata()).get("token", "")
    if not hmac.compare_digest(token, os.environ["HETERO_TOKEN"]):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "another HETERO_TOKEN")
    share = len(actions) // len(pipes)
    try:
        for number, pipe in enumerate(pipes):
            pipe.send_bytes(actions[number * share : (number + 1) * share])
        return b"".join(pipe.recv_bytes() for pipe in pipes)
    except (EOFError, OSError):  # an environment has failed: hetero starts this server again
        os._exit(1)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # a fork would hold the other processes' pipes open
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # in each process: together they have all cores
    first = 10_000 * int(os.environ.get("SM_CURRENT_HOST", "algo-1").removeprefix("algo-"))
    for seed in range(first, first + PER_CORE * len(os.sched_getaffinity(0)), PER_CORE):
        pipe, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=play, args=[theirs, seed], daemon=True).start()
        theirs.close()  # so that `pipe` ends with the process
        pipes.append(pipe)
    server = grpc.server(ThreadPoolExecutor(1), options=OPTIONS)  # one call after the other
    methods = {"step": grpc.unary_unary_rpc_method_handler(step)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("environments", methods)])
    server.add_insecure_port(os.environ["HETERO_SERVE_AT"])
    server.start()
    server.wait_for_termination()
