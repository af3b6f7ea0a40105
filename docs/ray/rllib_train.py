"""Learn CartPole-v1 with RLlib's PPO: the environments run on the data hosts."""

import serve  # before ray  # isort: skip

import os
import time

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig

ENVIRONMENT, UPDATES = "CartPole-v1", 10

serve.drive()
config = PPOConfig().environment(ENVIRONMENT)
config.env_runners(num_env_runners=int(ray.cluster_resources()["CPU"]), num_envs_per_env_runner=8)
config.learners(num_gpus_per_learner=int(torch.cuda.is_available()))
algorithm = config.build_algo()
for update in range(1, UPDATES + 1):
    begin = time.perf_counter()
    found = algorithm.train()["env_runners"]
    times = f"step_time_ms={1000 * (time.perf_counter() - begin):.1f}"
    steps = f"env_steps={found['num_env_steps_sampled_lifetime']:.0f}"
    print(f"step={update} return={found['episode_return_mean']:.1f} {steps} {times}", flush=True)
algorithm.save_to_path(os.path.join(os.environ["SM_MODEL_DIR"], "ppo"))
