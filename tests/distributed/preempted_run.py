"""A job that saves sharded checkpoints: ``composer -n 2 -m tests.distributed.preempted_run FOLDER MARKER``.

Touches ``MARKER-rank<N>`` when the second batch begins, and then takes its time for each batch.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

from composer import Callback
from composer.utils import dist

from tests.distributed.safety_cases import Losses
from tests.distributed.sharded_safety_cases import saver_of, trainer_of


class TakesItsTime(Callback):
    """A second for a batch, after the first."""

    def __init__(self, marker: str):
        self.marker = marker

    def batch_start(self, state, logger):
        if state.timestamp.batch == 1:
            pathlib.Path(f'{self.marker}-rank{dist.get_global_rank()}').touch()
        if state.timestamp.batch >= 1:
            time.sleep(1.0)


def main() -> None:
    """Train 6 batches, saving at the end only; write down the losses."""
    folder, marker = sys.argv[1:]
    losses = Losses()
    callbacks = [saver_of(folder, '1dur', autoresume=True, asynchronous=True), TakesItsTime(marker), losses]
    trainer = trainer_of(callbacks)
    trainer.fit()
    trainer.close()
    pathlib.Path(f'{marker}-losses{dist.get_global_rank()}').write_text(json.dumps(losses.by_batch))


if __name__ == '__main__':
    main()
