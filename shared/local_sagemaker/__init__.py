"""Run SageMaker training jobs on this machine, with the real SageMaker SDK.

    from shared import local_sagemaker

    sagemaker = local_sagemaker.start()      # from here on, or in a with block, this replaces AWS
    trainer = ModelTrainer(role=sagemaker.role, ...)
    trainer.train()                          # the SDK, boto3, S3, CloudWatch: unchanged

moto mocks AWS (S3, IAM, STS, CloudWatch, Logs, SageMaker's API), but only pretends to run training
jobs. Here they really run: each host is a process with its own /opt/ml tree, loopback address and
cores, and it runs the job's own entry point. `/opt/ml` is replaced in the request and in the SDK's
driver scripts; your own code finds its folders as on AWS, from SM_MODEL_DIR, SM_CHANNEL_... or
SAGEMAKER_BASE_DIR. It has no access to AWS or the mock, and `pip install` in a job only checks
whether the requirements are installed.

What AWS's model and reference forbid is refused (api_model.py, refusals.py), and so is what this
machine does not do (supported.py). What an account has, such as roles and subnets, is not checked.

Nothing reaches AWS or costs money: credentials, profiles and endpoints in the environment are set
aside, and a request that the mock does not answer is an error.
"""

from .isolation import set_aside

with set_aside():  # moto reads boto3's settings as soon as it is imported
    from .session import LocalSageMaker, start

__all__ = ["LocalSageMaker", "start"]
