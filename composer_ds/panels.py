"""What a person wants to see of a run: sections and panels, for the W&B dashboard and for ``composer-ds report``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ['BATCHES', 'OPTIMIZER_STEPS', 'SECTIONS', 'Panel', 'Section']

BATCHES = '_step'
"""W&B's own step, which is the number of batches with :class:`~composer_ds.WandBLogger`."""
OPTIMIZER_STEPS = 'optimizer_steps/applied'


@dataclass(frozen=True)
class Panel:
    """One plot.

    Args:
        title (str): Above it.
        keys (tuple[str, ...]): What is drawn, as logged; ``*`` stands for any text.
        x (str): The key of the x-axis. Default: applied optimizer steps.
        unit (str): Of the y-axis. Default: ``''``.
        without (tuple[str, ...]): Keys that are not drawn although they match. Default: none.
        is_stacked (bool): Whether the lines are parts of a whole. Default: False.
        is_log (bool): Whether the y-axis is logarithmic. Default: False.
    """

    title: str
    keys: tuple[str, ...]
    x: str = OPTIMIZER_STEPS
    unit: str = ''
    without: tuple[str, ...] = ()
    is_stacked: bool = False
    is_log: bool = False

    def choose(self, keys: Iterable[str]) -> list[str]:
        """Choose from keys that were logged.

        Args:
            keys (Iterable[str]): All that were logged.

        Returns:
            list[str]: Those of this panel, in the order of its ``keys``.
        """
        logged = sorted(set(keys) - set(self.without))
        chosen = [key for pattern in self.keys for key in fnmatch.filter(logged, pattern)]
        return list(dict.fromkeys(chosen))

    @property
    def regex(self) -> str | None:
        """The keys as one regular expression, where there are patterns among them."""
        if not any('*' in key for key in self.keys):
            return None
        return '|'.join(f'^{re.escape(key)}$'.replace(r'\*', '.*') for key in self.keys)


@dataclass(frozen=True)
class Section:
    """Panels that belong together.

    Args:
        title (str): Above them.
        panels (tuple[Panel, ...]): In their order.
    """

    title: str
    panels: tuple[Panel, ...]


_PHASES = ('forward', 'backward', 'reduction', 'optimizer', 'data_wait', 'checkpoint', 'other')
_KINDS = ('weights', 'master_weights', 'optimizer_state', 'gradients', 'communication', 'model_buffers')

SECTIONS = (
    Section(
        'Loss and learning rate',
        (
            Panel('Training loss', ('loss/train/*',), BATCHES),
            Panel('Learning rate', ('learning_rate/group*',)),
            Panel('Metrics', ('metrics/*',), BATCHES),
        ),
    ),
    Section(
        'Gradient and loss scale',
        (
            Panel('Gradient norm, before clipping', ('l2_norm/grad/global',), is_log=True),
            Panel('Clipping', ('gradient/clip_factor', 'gradient/clipped_fraction')),
            Panel('Loss scale', ('gradient/loss_scale',), is_log=True),
            Panel('Skipped optimizer steps', ('optimizer_steps/skipped',)),
            Panel('Update to weight, by parameter', ('update_to_weight/*',), is_log=True),
        ),
    ),
    Section(
        'Throughput and time',
        (
            Panel('Samples per second, all ranks', ('speed/samples_per_sec',), unit='samples/s'),
            Panel('Tokens per second, all ranks', ('speed/tokens_per_sec',), unit='tokens/s'),
            Panel(
                'Time of an optimizer step',
                tuple(f'time_split/{phase}_sec' for phase in _PHASES),
                unit='s',
                is_stacked=True,
            ),
        ),
    ),
    Section(
        'Memory and communication',
        (
            Panel(
                'Memory of each rank',
                ('zero_memory/total/rank*', 'zero_memory/total/highest', 'zero_memory/total/lowest'),
                unit='bytes',
            ),
            Panel(
                'Memory of the rank that logs',
                tuple(f'zero_memory/{kind}' for kind in _KINDS),
                unit='bytes',
                is_stacked=True,
            ),
            Panel('Memory, against the prediction', ('zero_memory/total', 'zero_memory/predicted/total'), unit='bytes'),
            Panel('Peak of allocated memory', ('zero_memory/peak_allocated', 'zero_memory/activations'), unit='bytes'),
            Panel(
                'Sent for an optimizer step',
                ('communication/measured_bytes', 'communication/expected_bytes'),
                unit='bytes',
            ),
        ),
    ),
    Section('Checkpoints', (Panel('Seconds in checkpoints', ('time_split/checkpoint_sec',), unit='s'),)),
)
