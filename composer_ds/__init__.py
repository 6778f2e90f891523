"""DeepSpeed for MosaicML Composer: ZeRO partitioning and offload as an algorithm of Composer's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer_ds.errors import ComposerDSError, ConfigError, EnvironmentProblem, ModelOutputError, TrainingError

if TYPE_CHECKING:
    from composer_ds.algorithm import DeepSpeed
    from composer_ds.whole import make_whole

__version__ = '0.1.0'

__all__ = [
    'ComposerDSError',
    'ConfigError',
    'DeepSpeed',
    'EnvironmentProblem',
    'ModelOutputError',
    'TrainingError',
    'make_whole',
]


def __getattr__(name: str):
    # Composer takes seconds to import; `run.py --help` and an error in a YAML file need not wait for it.
    if name == 'DeepSpeed':
        from composer_ds.algorithm import DeepSpeed

        return DeepSpeed
    if name == 'make_whole':
        from composer_ds.whole import make_whole

        return make_whole
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
