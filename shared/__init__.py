"""Code that the notebooks share: costs, logs, advice, and a SageMaker that runs locally."""
