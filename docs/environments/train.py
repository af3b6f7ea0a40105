"""PPO, similar to Spinning Up's, on environments that all hosts step at the same time."""

import os
import sys
import time

import grpc
import gymnasium
import numpy as np
import torch
from torch.distributions import Categorical
from torch.nn import Linear, Sequential, Tanh

from serve import ENVIRONMENT, OPTIONS

SECONDS = 60  # a host that does not answer for this long is lost
UPDATES, STEPS, PASSES = 80, 32, 20
GAMMA, LAMBDA, CLIP, LEARNING_RATE = 0.99, 0.95, 0.2, 2e-3


class Host:
    """A host, with a row for each of its environments. While it is lost, there are no rows."""

    def __init__(self, address: str):
        self.address, self.life, self.rows = address, b"", np.zeros((0, 3 + inputs), np.float32)
        self.step = grpc.insecure_channel(address, OPTIONS).unary_unary("/environments/step")
        self.ask(b"")

    def ask(self, actions: bytes) -> None:
        """Step the environments. Without actions, get their rows as soon as the host answers."""
        token = [("token", os.environ["HETERO_TOKEN"])]
        request = self.life + actions if actions else b""
        self.reply = self.step.future(request, SECONDS, token, wait_for_ready=not actions)

    def take(self) -> np.ndarray:
        """Wait for the rows. If the call fails, the host is lost and is asked again."""
        try:
            reply = self.reply.result()
            self.life, rows = reply[:8], np.frombuffer(reply, np.float32, offset=8)
            self.rows = rows.reshape(-1, 3 + inputs)
        except grpc.RpcError as error:
            print(f"{self.address} is lost: {error.code().name}, {error.details()}", flush=True)
            self.rows = self.rows[:0]
            self.ask(b"")
        return self.rows


addresses = os.environ.get("HETERO_DATA_HOSTS")
if not addresses or os.environ.get("WORLD_SIZE", "1") != "1":
    sys.exit("train.py: error: use a data_group and a single rank (one training host, --ranks 1).")
environment = gymnasium.make(ENVIRONMENT)  # only to read its spaces
observations, actions = environment.observation_space, environment.action_space
spaces = gymnasium.spaces
if not isinstance(observations, spaces.Box) or not isinstance(actions, spaces.Discrete):
    sys.exit(
        "train.py: error: the policy needs Box observations and Discrete actions, not "
        f"{observations}, {actions}."
    )

torch.manual_seed(0)
torch.set_num_threads(1)  # the networks are small
device, inputs = "cuda" if torch.cuda.is_available() else "cpu", int(np.prod(observations.shape))
policy, value = (
    Sequential(Linear(inputs, 64), Tanh(), Linear(64, 64), Tanh(), Linear(64, outputs)).to(device)
    for outputs in (actions.n, 1)
)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], LEARNING_RATE)
hosts, returns = [Host(a) for a in addresses.split(",")], []  # returns of ended episodes
for update in range(1, UPDATES + 1):
    begin, waited, rollout = time.perf_counter(), 0.0, []
    there = [h for h in hosts if len(h.rows) or h.reply.done() and len(h.take())]
    while not there and time.perf_counter() < begin + SECONDS:  # at the start, or if all are lost
        time.sleep(1)
        there = [h for h in hosts if len(h.take())]
    there = there or sys.exit(f"train.py: error: no environments on {addresses}. See their logs.")
    rows = np.concatenate([host.rows for host in there])
    ends = np.cumsum([len(host.rows) for host in there])
    while len(rollout) < STEPS and len(rows) == ends[-1]:
        observation = torch.from_numpy(rows[:, 3:]).to(device)
        with torch.no_grad():
            choice, estimate = Categorical(logits=policy(observation)), value(observation)[:, 0]
        action = choice.sample()
        asked = time.perf_counter()
        shares = np.split(action.cpu().numpy() + actions.start, ends)  # the last is empty
        for host, share in zip(there, shares, strict=False):
            host.ask(share.tobytes())
        rows = np.concatenate([host.take() for host in there])
        waited += time.perf_counter() - asked
        reward, total, end = torch.from_numpy(rows[:, :3]).to(device).T
        returns += total[end > 0].tolist()
        rollout.append((observation, action, choice.log_prob(action), estimate, reward, 1 - end))
    if len(rows) < ends[-1]:  # a host is lost: discard this rollout
        continue
    observation, action, old, estimate, reward, on = map(torch.stack, zip(*rollout, strict=True))
    following = value(torch.from_numpy(rows[:, 3:]).to(device))[:, 0].detach()
    advantage, later = torch.zeros_like(reward), 0.0
    for t in reversed(range(STEPS)):  # an episode that is cut off counts as ended
        advantage[t] = later = (
            reward[t] + on[t] * GAMMA * (following + LAMBDA * later) - estimate[t]
        )
        following = estimate[t]
    target = advantage + estimate
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(PASSES):
        choice = Categorical(logits=policy(observation))
        ratio = (choice.log_prob(action) - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        error = (value(observation)[..., 0] - target).pow(2).mean()
        optimizer.zero_grad()
        (error / 2 - gain - 0.01 * choice.entropy().mean()).backward()
        optimizer.step()
    if update % 10 == 0:
        ms = 1000 * (time.perf_counter() - begin)
        told = f"environments={len(rows)} env_steps_per_s={1000 * STEPS * len(rows) / ms:.0f}"
        told += f" step_time_ms={ms:.1f} data_wait_ms={1000 * waited:.1f}"
        print(f"step={update} return={np.mean(returns[-50:]):.1f} {told}", flush=True)
print(f"mean return: {np.mean(returns[:50]):.1f} initially, {np.mean(returns[-50:]):.1f} finally")
torch.save(policy.state_dict(), os.path.join(os.environ.get("SM_MODEL_DIR", "."), "policy.pt"))
