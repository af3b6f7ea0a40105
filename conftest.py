"""Tests never leave this machine: the notebooks among them run locally, whatever the shell says."""

import os

os.environ["SAGEMAKER_TARGET"] = "local"
