"""Scikit-learn's digits: 1,797 grey images of 8 by 8 pixels, which the package ships, so nothing is downloaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

from composer_ds.errors import ConfigError

__all__ = ['DigitsSplits', 'read_digits']

_LARGEST_PIXEL = 16.0


class DigitsSplits(NamedTuple):
    """Images with their digits.

    Args:
        train (TensorDataset): Pairs of an image, fp32 of shape (1, 8, 8) in [0, 1], and its digit, int64.
        test (TensorDataset): The same, of images that are not in ``train``.
    """

    train: TensorDataset
    test: TensorDataset


def read_digits(*, seed: int, test_fraction: float) -> DigitsSplits:
    """Reads the images and splits them. No rank talks to another.

    Args:
        seed (int): Another seed gives another split.
        test_fraction (float): Share of the images in the test split, in (0, 1).

    Returns:
        DigitsSplits: The same on every rank; a part may be empty.

    Raises:
        ConfigError: Scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            'recipes.image_classification reads the images that the package scikit-learn ships, which is not '
            'installed: pip install scikit-learn'
        ) from error
    digits: Any = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / _LARGEST_PIXEL
    targets = torch.as_tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    tests = round(test_fraction * len(targets))
    held_out, trained_on = order[:tests], order[tests:]
    return DigitsSplits(
        TensorDataset(images[trained_on], targets[trained_on]), TensorDataset(images[held_out], targets[held_out])
    )
