"""What DeepSpeed says: warnings once, from rank 0; errors from every rank; not its own progress, nor torch's.

With the environment variable ``DEEPSPEED_LOG_LEVEL`` everything is as DeepSpeed has it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from composer.utils import dist

from composer_ds.announcements import announce
from composer_ds.compiling import announce_old_locks, is_compiled

__all__ = ['import_quietly', 'quiet_output', 'quieten_logger']

_VARIABLE = 'DEEPSPEED_LOG_LEVEL'
# Printed, not logged, by DeepSpeed (0.19) and by torch's loader of extensions, on every rank.
_NOISE = re.compile(
    r'No CUDA runtime is found'
    r'|DeepSpeed \S+ built successfully'
    r'|Time to load \S+ op: '
    r'|(Loading|Building) extension module '
    r'|Using \S+ as PyTorch extensions root\.\.\.'
    r'|Creating (extension )?directory '
    r'|(Detected CUDA files, patching ldflags|Emitting ninja build file |Allowing ninja to set a default)'
    r'|No modifications detected for re-loaded extension module '
)
_EXTENSION = 'deepspeed_shm_comm'
# Warnings about what ownership.py has settled, and what the clock says with more facts.
_SETTLED = ('untested optimizer', 'OVERFLOW!')
_said: set[str] = set()


def quieten_logger(ds_config: Mapping[str, Any]) -> None:
    """Keep what DeepSpeed logs to what somebody can do something about. Called on every rank.

    Args:
        ds_config (Mapping[str, Any]): The complete config: ``steps_per_print`` asks for lines of its own.
    """
    logger = logging.getLogger('DeepSpeed')  # the same object before and after deepspeed is imported
    logger.setLevel(os.environ.get(_VARIABLE, 'WARNING').upper())
    logger.removeFilter(_is_progress)
    if 'steps_per_print' in ds_config and 'log_level' not in ds_config and logger.level > logging.INFO:
        logger.setLevel(logging.INFO)
        logger.addFilter(_is_progress)


def import_quietly() -> None:
    """Prepare for ``import deepspeed``, which is to say nothing but warnings, on rank 0. Called on every rank.

    DeepSpeed imports torch's loader of extensions, which prints something then. That is done here, and deepspeed not
    imported: loggers that are made while it is keep the stream.
    """
    if os.environ.get(_VARIABLE) is None:
        logging.getLogger('DeepSpeed').addFilter(_is_news)
    with _without_noise():
        import torch.utils.cpp_extension  # noqa: F401


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Leave out of stdout and stderr what is printed while DeepSpeed builds an engine, on every rank.

    Compiling takes a minute, and a lock that was left behind makes torch wait for ever: rank 0 says what is going on.
    """
    import_quietly()
    import deepspeed  # noqa: F401

    if not torch.cuda.is_available() and not is_compiled(_EXTENSION):
        announce("Compiling DeepSpeed's collectives for the CPU: once on each machine, about a minute.")
    announce_old_locks()
    with _without_noise():
        yield


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    if os.environ.get(_VARIABLE) is not None:
        yield
        return
    out: Any = _WithoutNoise(sys.stdout)
    err: Any = _WithoutNoise(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _WithoutNoise:
    """A text stream without some lines, as far as they are written by Python.

    Args:
        stream (Any): Where the others go.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._drops_newline = False

    def write(self, text: str) -> int:
        # print() writes a line and its end one after the other.
        if self._drops_newline and text == '\n':
            self._drops_newline = False
        elif _NOISE.match(text):
            self._drops_newline = not text.endswith('\n')
        else:
            self._drops_newline = False
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_progress(record: logging.LogRecord) -> bool:
    """Whether a line is what ``steps_per_print`` asks for, or a warning."""
    return record.levelno >= logging.WARNING or 'step=' in record.getMessage()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line is an error, or is said by rank 0; a warning for the first time."""
    if record.levelno >= logging.ERROR:
        return True
    message = record.getMessage()
    if any(settled in message for settled in _SETTLED):
        return False
    if dist.get_global_rank() != 0:
        return False
    if record.levelno < logging.WARNING:
        return True  # what steps_per_print asks for may be alike in two runs
    is_new = message not in _said
    _said.add(message)
    return is_new
