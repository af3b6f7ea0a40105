"""SageMaker training jobs on this machine, heterogeneous clusters too, with the real SageMaker SDK.

    from shared import local_sagemaker

    sagemaker = local_sagemaker.start()      # this process's AWS is this machine from here on
    trainer = ModelTrainer(role=sagemaker.role, ...)
    trainer.train()                          # the SDK, boto3, S3, CloudWatch: unchanged

    with local_sagemaker.start() as sagemaker:
        ...                                  # or only for a block

Made for the notebooks beside it and useful without them: to try, test and teach any training job
that the SDK starts with a `source_code`. What is AWS's is moto's (S3, IAM, STS, CloudWatch, Logs,
SageMaker's API); training jobs, which moto only pretends to run, really run: each host is a process
with its own /opt/ml tree, loopback address and cores, and the job's own entry point runs in it.
`/opt/ml` is replaced in the entry point and in the SDK's driver scripts; your own code finds its
folders as it should on AWS too, from the variables SM_MODEL_DIR, SM_CHANNEL_... or from
SAGEMAKER_BASE_DIR (default /opt/ml).

Not here: container images (a Python environment takes an image's place, yours if `start` names no
other, and `pip install` in a job only verifies), channels other than S3 prefixes that each host
gets all of, in File mode (FastFile is taken as File, in a printed line, and the rest refused), warm
pools, spot interruptions, GPUs, and AWS from inside a job: its code has neither credentials nor the
mock. Linux only.

A `\\r`, as progress bars print it, ends a line of a host's log. Published logs of jobs on SageMaker
have `#015` in its place, within one long line.

Nothing reaches AWS or costs money: credentials, profiles and endpoints of the environment are set
aside, and a request that the mock does not answer is an error.
"""

from .isolation import set_aside

with set_aside():  # moto asks boto3 for its settings as soon as it is imported
    from .session import LocalSageMaker, start

__all__ = ["LocalSageMaker", "start"]
