"""``'auto'`` in a ds_config: a placeholder for what the Trainer or the model decides, as Hugging Face has it.

Hugging Face fills in batch sizes, clipping, precision, bucket sizes, and the parameters of optimizer and scheduler.
Each of them is filled in here, too, from Composer's Trainer; every other ``'auto'`` is an error.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from composer_ds.ds_keys import auto_is_a_value

__all__ = ['LEAVE_OUT', 'UNDERSTOOD', 'hidden_size_of', 'leftover_autos', 'model_values', 'resolve_auto']

UNDERSTOOD = (
    'train_batch_size', 'train_micro_batch_size_per_gpu', 'gradient_accumulation_steps', 'gradient_clipping',
    'fp16.enabled', 'bf16.enabled', 'torch_autocast.enabled', 'torch_autocast.dtype', 'zero_optimization.stage',
    'zero_optimization.reduce_bucket_size', 'zero_optimization.stage3_prefetch_bucket_size',
    'zero_optimization.stage3_param_persistence_threshold', 'optimizer.type', 'optimizer.params.*', 'scheduler.type',
    'scheduler.params.*',
)  # fmt: skip
"""Where ``'auto'`` may stand, for the reader of an error; the sections themselves may be ``'auto'``, too."""

LARGEST_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's own default of ``reduce_bucket_size``."""


class _Removal(enum.Enum):  # an enum member stays the same object when it is copied or sent to another process
    LEAVE_OUT = 'left out'

    def __repr__(self) -> str:
        return self.value


LEAVE_OUT = _Removal.LEAVE_OUT
"""In place of a value: the key is left out of the config."""


def resolve_auto(ds_config: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace each ``'auto'`` for which there is a value.

    Args:
        ds_config (Mapping[str, Any]): The config; it is not changed.
        known (Mapping[str, Any]): Values by dotted path, such as ``'fp16.enabled'``; the path may be that of a section.
            ``LEAVE_OUT`` removes the key.

    Returns:
        tuple[dict[str, Any], dict[str, Any]]: A new config, and the value of each path that was replaced.
    """
    resolved: dict[str, Any] = {}
    return _resolve(ds_config, known, resolved, ()), resolved


def _resolve(
    section: Mapping[str, Any], known: Mapping[str, Any], resolved: dict[str, Any], above: tuple[str, ...]
) -> dict[str, Any]:
    result = {}
    for key, value in section.items():
        path = '.'.join((*above, str(key)))
        if isinstance(value, Mapping):
            result[key] = _resolve(value, known, resolved, (*above, str(key)))
            continue
        if _is_auto(value) and path in known:
            value = resolved[path] = known[path]
        if value is not LEAVE_OUT:
            result[key] = copy.deepcopy(value)
    return result


def leftover_autos(ds_config: Mapping[str, Any], understood: Iterable[str] = UNDERSTOOD) -> Iterator[str]:
    """Find each ``'auto'`` that nothing has replaced. Imports deepspeed if there is one.

    DeepSpeed would take its default for some of them, without a word, and fail on others. Where ``'auto'`` is its own
    default, as for ``data_types.keep_in_fp32_modules``, it is a value like any other.

    Args:
        ds_config (Mapping[str, Any]): The config after ``resolve_auto``.
        understood (Iterable[str]): Where ``'auto'`` may stand, for the text. Default: ``UNDERSTOOD``.

    Yields:
        str: One problem each.
    """
    for path in _paths_of_autos(ds_config, ()):
        if not auto_is_a_value(path):
            place = 'ds_config' + ''.join(f'[{key}]' if isinstance(key, int) else f'.{key}' for key in path)
            yield (
                f"{place}='auto': neither the Trainer nor the model says what it stands for; write a value, or leave "
                f"it out. 'auto' is understood for {', '.join(understood)}"
            )


def _paths_of_autos(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if _is_auto(value):
        yield path
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _paths_of_autos(below, (*path, key))
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _paths_of_autos(below, (*path, index))


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == 'auto'  # a tensor or an array compares element by element


def model_values(hidden_size: int | None, trained_elements: int) -> dict[str, Any]:
    """Decide what the model decides.

    With a hidden size these are the formulas of ``transformers.integrations.deepspeed`` (5.24): a bucket holds about
    one square weight matrix, and what is smaller than some vectors is not partitioned. A bucket larger than all that
    is trained would only reserve memory. Without a hidden size DeepSpeed's defaults stay.

    Args:
        hidden_size (int | None): Width of the model in elements; None when its config names none.
        trained_elements (int): Elements of all parameters that are trained.

    Returns:
        dict[str, Any]: Values by dotted path, for ``resolve_auto``, in elements.
    """
    square = LARGEST_BUCKET_ELEMENTS if hidden_size is None else hidden_size * hidden_size
    sizes = {
        'reduce_bucket_size': max(1, min(square, trained_elements)),
        'stage3_prefetch_bucket_size': LEAVE_OUT if hidden_size is None else int(0.9 * hidden_size * hidden_size),
        'stage3_param_persistence_threshold': LEAVE_OUT if hidden_size is None else 10 * hidden_size,
    }
    return {f'zero_optimization.{key}': value for key, value in sizes.items()}


def hidden_size_of(model: Any) -> int | None:
    """Read the width of a model from its config, as Hugging Face's models have one.

    Args:
        model (Any): A model, or a wrapper that holds it as ``model``, such as Composer's ``HuggingFaceModel``.

    Returns:
        int | None: The largest hidden size, in elements; None when there is no config, or none in it.
    """
    for owner in (model, getattr(model, 'model', None)):
        config = getattr(owner, 'config', None)
        for part in (config, getattr(config, 'text_config', None)):  # of a model that takes text and more
            size = _hidden_size_in(part)
            if size is not None:
                return size
    return None


def _hidden_size_in(config: Any) -> int | None:
    sizes = getattr(config, 'hidden_sizes', None)
    for size in (
        getattr(config, 'hidden_size', None),
        max(sizes, default=None) if isinstance(sizes, list | tuple) and all(map(_is_size, sizes)) else None,
        getattr(config, 'd_model', None),
    ):
        if _is_size(size):
            return size
    return None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
