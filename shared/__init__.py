"""What the notebooks share: costs, logs and a SageMaker that runs on this machine."""
