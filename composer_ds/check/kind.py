"""Telling the YAML file of a run from a ds_config."""

from __future__ import annotations

import difflib
from pathlib import Path

from composer_ds.ds_config import read_ds_config
from composer_ds.errors import ConfigError

__all__ = ['is_run_file']

# Of these a run has some, and a ds_config none. (`optimizer` and `scheduler` are sections of both.)
_KEYS_OF_A_RUN = {'task', 'train', 'model', 'data', 'deepspeed', 'callbacks', 'loggers'}


def is_run_file(file: str) -> bool:
    """Read a file and say what it is.

    Args:
        file (str): Path.

    Returns:
        bool: Whether it describes a run; otherwise it is taken for a ds_config.

    Raises:
        ConfigError: When there is no such file, or it does not parse.
    """
    path = Path(file)
    if not path.is_file():
        nearby = [str(entry) for pattern in ('*.y*ml', '*.json') for entry in path.parent.glob(pattern)]
        match = difflib.get_close_matches(file, nearby, n=1, cutoff=0.5)
        hint = f"; did you mean '{match[0]}'?" if match else f' (the working directory is {Path.cwd()})'
        raise ConfigError(f'{file}: no such file{hint}')
    try:
        return bool(_KEYS_OF_A_RUN & read_ds_config(path).keys())
    except ConfigError as error:
        # Written as a ds_config by the reader, but it may be a run.
        raise ConfigError([problem.replace('ds_config=', '', 1) for problem in error.problems]) from error
