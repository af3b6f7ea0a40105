"""Run SageMaker training jobs on this machine, with the real SageMaker SDK.

    from shared import local_sagemaker

    sagemaker = local_sagemaker.start()      # from here on, this machine replaces AWS
    trainer = ModelTrainer(role=sagemaker.role, ...)
    trainer.train()                          # the SDK, boto3, S3, CloudWatch: unchanged

    with local_sagemaker.start() as sagemaker:
        ...                                  # or only for a block

You can try, test and teach any training job that the SDK starts with a `source_code`, also on a
heterogeneous cluster. moto mocks AWS (S3, IAM, STS, CloudWatch, Logs, SageMaker's API). moto only
pretends to run training jobs, but here they really run: each host is a process with its own /opt/ml
tree, loopback address and cores, and it runs the job's own entry point. `/opt/ml` is replaced in
the request's command, hyperparameters and environment, and in the SDK's driver scripts. Your own
code should find its folders as on AWS, from SM_MODEL_DIR, SM_CHANNEL_... or SAGEMAKER_BASE_DIR.

What AWS's model and reference forbid is refused (model.py, refusals.py), and so is what this
machine does not do (parts.py). What an account has, such as roles and subnets, is not checked.
A job's code has no access to AWS or the mock, and `pip install` in a job only checks whether the
requirements are installed. A `\\r`, which progress bars print, ends a line of a log.

Nothing reaches AWS or costs money: credentials, profiles and endpoints in the environment are set
aside, and a request that the mock does not answer is an error.
"""

from .isolation import set_aside

with set_aside():  # moto reads boto3's settings as soon as it is imported
    from .session import LocalSageMaker, start

__all__ = ["LocalSageMaker", "start"]
