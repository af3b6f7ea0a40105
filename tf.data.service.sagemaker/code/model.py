"""Two classifiers of 32x32 colour images: ResNet50, and a smaller one for CPUs."""

import tensorflow as tf

from pipeline import CHANNELS, SIDE

CLASSES = 10


def small_resnet() -> tf.keras.Model:
    """ResNet-8: the residual network of He et al. (2015) for CIFAR-10, with one block per stage.

    A training step takes about as long as augmenting the images, so two machines can share the work
    well, even if both are small.
    """

    def convolve(x: tf.Tensor, filters: int, stride: int = 1) -> tf.Tensor:
        x = tf.keras.layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        return tf.keras.layers.BatchNormalization()(x)

    images = tf.keras.Input((SIDE, SIDE, CHANNELS))
    x = tf.keras.layers.ReLU()(convolve(images, 16))
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        y = convolve(tf.keras.layers.ReLU()(convolve(x, filters, stride)), filters)
        if stride > 1:
            x = tf.keras.layers.Conv2D(filters, 1, stride, use_bias=False)(x)
        x = tf.keras.layers.ReLU()(x + y)
    x = tf.keras.layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(images, tf.keras.layers.Dense(CLASSES)(x))


def resnet50() -> tf.keras.Model:
    """Keras's ResNet50, without pretrained weights."""
    return tf.keras.applications.ResNet50(
        weights=None,
        input_shape=(SIDE, SIDE, CHANNELS),
        classes=CLASSES,
        classifier_activation=None,
    )


MODELS = {"resnet50": resnet50, "small": small_resnet}


def build_model(name: str) -> tf.keras.Model:
    """Return a new model of that name. It maps images (N, 32, 32, 3) to logits (N, 10).

    Raises ValueError if there is no model of that name.
    """
    if name not in MODELS:
        raise ValueError(f"There is no model {name!r}: choose one of {', '.join(MODELS)}.")
    return MODELS[name]()
