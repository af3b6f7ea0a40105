"""Step environments on all cores of this host: python -m hetero --serve serve.py train.py."""

import hmac
import multiprocessing.connection
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import gymnasium
import numpy as np

ENVIRONMENT = "CartPole-v1"  # or "module:Name-v0", if the module registers it
PER_CORE = 8  # environments in each process, which steps them one after the other
STEP_SECONDS = 50  # for a step, and for the start before the first one; train.py waits for 60
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 1000)]
OPTIONS += [("grpc.enable_http_proxy", 0)]  # hosts of one job talk directly
LIFE = os.urandom(8)  # identifies this server: after a restart it has new environments
pipes: list[multiprocessing.connection.Connection] = []  # one for each process


def play(pipe: multiprocessing.connection.Connection, seed: int) -> None:
    """Run environments in this process: for each message, step them and send their rows back.

    A message contains the actions. If it is empty, the environments do not step.
    """
    envs = gymnasium.make_vec(ENVIRONMENT, PER_CORE, "sync", {"autoreset_mode": "SameStep"})
    space, (observation, _) = envs.action_space, envs.reset(seed=seed)
    reward, total, done = np.zeros((3, PER_CORE))
    with suppress(EOFError):  # raised when the server ends
        while True:
            if actions := pipe.recv_bytes():
                actions = np.frombuffer(actions, np.int64).astype(space.dtype)
                observation, reward, ended, cut_off, _ = envs.step(actions.reshape(space.shape))
                total, done = total * (1 - done) + reward, 1.0 * (ended | cut_off)
            rows = np.column_stack([reward, total, done, observation.reshape(PER_CORE, -1)])
            pipe.send_bytes(rows.astype(np.float32).tobytes())


def step(request: bytes, context: grpc.ServicerContext) -> bytes:
    """Step all environments, and return a row of float32 for each. Without actions, do not step.

    The request begins with the LIFE of the last reply, and each reply begins with LIFE.
    """
    token = dict(context.invocation_metadata()).get("token", "")
    if not hmac.compare_digest(token, os.environ["HETERO_TOKEN"]):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing HETERO_TOKEN")
    life, actions = request[:8], request[8:]
    if actions and life != LIFE:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this server has been restarted")
    share = len(actions) // len(pipes)
    try:
        for number, pipe in enumerate(pipes):
            pipe.send_bytes(actions[number * share : (number + 1) * share])
        end = time.monotonic() + STEP_SECONDS
        for pipe in pipes:
            if not pipe.poll(max(0, end - time.monotonic())):
                raise EOFError
        return LIFE + b"".join(pipe.recv_bytes() for pipe in pipes)
    except (EOFError, OSError):  # an environment fails or hangs: hetero restarts this server
        os._exit(1)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # a fork would keep the other pipes open
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes already use all cores
    first = 10_000 * int(os.environ.get("SM_CURRENT_HOST", "algo-1").removeprefix("algo-"))
    for seed in range(first, first + PER_CORE * len(os.sched_getaffinity(0)), PER_CORE):
        pipe, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=play, args=[theirs, seed], daemon=True).start()
        theirs.close()  # so that `pipe` closes when the process ends
        pipes.append(pipe)
    server = grpc.server(ThreadPoolExecutor(1), options=OPTIONS)  # one call at a time
    methods = {"step": grpc.unary_unary_rpc_method_handler(step)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("environments", methods)])
    server.add_insecure_port(os.environ["HETERO_SERVE_AT"])
    server.start()
    server.wait_for_termination()
