"""Keras and TensorFlow import the real one if they can: see helpers/data_service.py."""

raise ImportError
