"""A torch Dataset on other machines: copy this folder, and read it in this order.

batches.py            which samples are in which batch, and with which random numbers
client.py             what a training script has of the data hosts: a Dataset, and its batches
epoch.py              how they are fetched: which host is asked for which, and when
server.py, worker.py  what a data host does: serve the batches that its worker processes prepare
wire.py               how a batch travels, with dataset_feed.proto
spare.py              the cores of a training host on which one more data server runs
"""
