"""Pretrained weights with their tokenizer, from a folder or from the hub, failing fast and on every rank alike."""

from __future__ import annotations

import os
from typing import Any

import huggingface_hub
from composer.utils import dist
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from composer_ds.errors import ConfigError

__all__ = ['load_pretrained']

_PROBE_TIMEOUT_SEC = 10.0

# transformers 5 has no public name for what its AutoModelFor... classes have in common.
ModelClass = Any


def load_pretrained(
    model_class: ModelClass, name: str, *, alternative: str = '', **config: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer from a local folder, from the hub's cache on this machine, or from the hub.

    Collective: one process of each node looks for the files and downloads what is missing; the others wait for its
    verdict and read the same files. A model that takes longer to download than the ``dist_timeout`` of the process
    group should be downloaded beforehand.

    Args:
        model_class (ModelClass): Class with ``from_pretrained``: of one kind of model, or an ``AutoModelFor...``.
        name (str): ``model.pretrained``: a folder, or the name of a repository on the hub.
        alternative (str): What else can be done when the hub cannot be reached, as the end of the sentence 'Copy the
            files here; or ...'.
        **config (Any): Settings of the model's configuration to replace.

    Returns:
        tuple[PreTrainedModel, PreTrainedTokenizerBase]: Weights on the CPU in fp32, and the tokenizer.

    Raises:
        ConfigError: On every rank, when one node cannot get the files.
    """
    found = _fetch(model_class, name, config, alternative) if dist.get_local_rank() == 0 else None
    problems = [other for other in dist.all_gather_object(found if isinstance(found, str) else None) if other]
    if problems:
        raise ConfigError(problems[0])
    if found is None:
        found = _read(model_class, name, config, local_files_only=True)
    assert not isinstance(found, str)  # Invariant: a string is a problem, and it was raised above.
    return found


def _fetch(
    model_class: ModelClass, name: str, config: dict[str, Any], alternative: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | str:
    """Loads from what is on this machine, or else from the hub.

    Args:
        model_class (ModelClass): Class with ``from_pretrained``: of one kind of model, or an ``AutoModelFor...``.
        name (str): A folder, or the name of a repository on the hub.
        config (dict[str, Any]): Settings of the model's configuration to replace.
        alternative (str): As for :func:`load_pretrained`.

    Returns:
        tuple[PreTrainedModel, PreTrainedTokenizerBase] | str: Model and tokenizer, or what is wrong and what to do.
    """
    # Whatever goes wrong becomes text: an exception would leave the other ranks waiting for this one's verdict.
    try:
        return _read(model_class, name, config, local_files_only=True)
    except Exception as error:
        if os.path.isdir(name):
            return (
                f'model.pretrained is {name!r}, a folder from which {model_class.__name__} and its tokenizer do not '
                f'load ({_first_line(error)}). Give a folder that save_pretrained of both, or a download, has '
                'written.'
            )
    try:
        # transformers retries for more than 20 s when there is no network; this request is made once.
        huggingface_hub.HfApi().model_info(name, timeout=_PROBE_TIMEOUT_SEC)
        return _read(model_class, name, config, local_files_only=False)
    except Exception as error:
        return (
            f'model.pretrained is {name!r}, which is no folder here, is not in the cache of this machine and cannot be '
            f'loaded from the hub now ({_first_line(error)}). On a machine with network, run '
            f'`hf download {name} --local-dir FOLDER`, copy FOLDER here and write model.pretrained=FOLDER'
            f'{alternative and f"; or {alternative}"}.'
        )


def _read(
    model_class: ModelClass, name: str, config: dict[str, Any], *, local_files_only: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reads configuration, tokenizer and weights, downloading them where allowed.

    Args:
        model_class (ModelClass): Class with ``from_pretrained``: of one kind of model, or an ``AutoModelFor...``.
        name (str): A folder, or the name of a repository on the hub.
        config (dict[str, Any]): Settings of the model's configuration to replace.
        local_files_only (bool): Whether the network is left alone.

    Returns:
        tuple[PreTrainedModel, PreTrainedTokenizerBase]: Weights on the CPU in fp32, and the tokenizer.

    Raises:
        ValueError: If the weights are of another kind of model; transformers would only warn, and start from random
            weights under the names that the two do not share.
    """
    given = AutoConfig.from_pretrained(name, local_files_only=local_files_only).model_type
    # The classes of transformers that choose the kind by the configuration have none of their own.
    wanted = getattr(getattr(model_class, 'config_class', None), 'model_type', given)
    if given != wanted:
        raise ValueError(f'it holds a model of type {given}, not {wanted}')
    tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only)
    network = model_class.from_pretrained(name, local_files_only=local_files_only, dtype='float32', **config)
    return network, tokenizer


def _first_line(error: Exception) -> str:
    return f'{type(error).__name__}: {(str(error).splitlines() or ["no message"])[0]}'
